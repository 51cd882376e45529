"""The driver's side of `StageAveraging`: a round is a stage of tasks, then stages that add up what they left.

Each round goes from one checkpoint to the next. Task k reads the checkpoint's shared weights and replica k's own
state, trains, and writes its state and its part of the average under names of its own; tasks in a tree of fan-in 8
add up the parts, and the last of them writes the new shared weights. The manifest that the driver writes names the
files of the tasks whose results Spark took, so what a killed task or a second attempt has written does not count.
The driver sees names and times, never weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import TrainingFailed
from dl_on_spark.input_pipeline import Cursor, SamplePlan
from dl_on_spark.lake import Schema, storage
from dl_on_spark.launch import LaunchRequest, Message
from dl_on_spark.launch.stages import Stages
from dl_on_spark.sync.stage_averaging import StageAveraging
from dl_on_spark.sync.tree_sum import FAN_IN, after_round, combine
from dl_on_spark.training import state
from dl_on_spark.training.checkpoint import MODEL, Checkpoint, CheckpointStore, FileDigest, Manifest, of_task
from dl_on_spark.training.recorded import Recorded, validation_loss
from dl_on_spark.training.run_folder import STAGES_OPEN, Attempt, RunFolder, RunRecord
from dl_on_spark.training.step_clock import StepSeconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENTRY = "dl_on_spark.training.stage_worker:serve"
File = dict[str, Any]
"""A `FileDigest` as plain values."""


def train_in_stages(
    spark: SparkSession, request: LaunchRequest, on_message: Callable[[Message], None], *, job: dict[str, Any]
) -> list[dict[str, Any]]:
    """Train a run, or the rest of one, as `launch` does with workers that are there at once; outcomes by replica.

    ``job``: the fields of a `WorkerJob`. Raises what `launch` raises.
    """
    folder, attempt = RunFolder(job["run_folder"]), job["attempt"]
    folder.write(STAGES_OPEN, attempt.token)
    try:
        return _StageRun(Stages(spark, request, attempt.token), request, folder, job, on_message).train()
    finally:
        storage.delete(folder.path(STAGES_OPEN))


class _StageRun:
    """One attempt of a run."""

    def __init__(
        self,
        stages: Stages,
        request: LaunchRequest,
        folder: RunFolder,
        job: dict[str, Any],
        on_message: Callable[[Message], None],
    ) -> None:
        self._stages, self._replicas, self._folder, self._job = stages, request.num_workers, folder, job
        self._record: RunRecord = job["record"]
        self._strategy: StageAveraging = job["strategy"]
        self._plan = SamplePlan.from_json(self._record.plan)
        attempt = self._attempt = job["attempt"]
        self._store = _store(folder.uri, attempt)
        self._on_message = on_message
        self._recorded = Recorded()
        self._spent = [StepSeconds() for _ in range(self._replicas)]
        self._updates = 0
        self._rounds = 0

    def train(self) -> list[dict[str, Any]]:
        """Round after round to the last epoch's end, then the model."""
        self._stages.order({"do": "check"}, self._replicas, "build the model")
        if self._job["resume_from"] is None:
            self._begin()
            name = self._commit(Cursor(0, 0), self._order("begin", {}, "first weights"), {})
        else:
            self._folder.begin(self._record, {})
            name = self._job["resume_from"]
            self._recorded = Recorded(**self._store.open(name).manifest.progress)
        stop = False
        while not stop and self._store.open(name).manifest.cursor.epoch < self._record.epochs:
            name, stop = self._round(self._store.open(name))
        saved = self._stages.order({"do": "save", "from": name}, 1, "save the model")
        outcome = {
            **asdict(self._recorded),
            "epochs": len(next(iter(self._recorded.history.values()), [])),
            "optimizer_steps": saved[0]["updates"],
        }
        return [
            {**outcome, "bytes_sent": 0 if rank else self._recorded.bytes_sent, "seconds": spent.as_dict()}
            for rank, spent in enumerate(self._spent)
        ]

    def _begin(self) -> None:
        """Make the folder this run's: the model is built, nothing is refused any more."""
        self._store.fence()
        job = self._job
        files = {"schema.yaml": Schema.from_dict(job["schema"]).to_yaml(), "snapshot.json": job["snapshot"]}
        self._folder.begin(self._record, {**files, "statistics.json": job["statistics"]})

    def _round(self, checkpoint: Checkpoint) -> tuple[str, bool]:
        """From a checkpoint to the next one; its name, and whether callbacks end the training there."""
        cursor, steps = checkpoint.manifest.cursor, self._plan.steps_per_epoch
        every = self._job["checkpoint_every"]
        done = cursor.epoch * steps + cursor.step
        last = self._strategy.round_end(cursor.step, steps)
        if every is not None:
            last = min(last, cursor.step + every - done % every)
        name = checkpoint.folder.rsplit("/", 1)[-1]
        began = time.monotonic()
        order = {"from": name, "epoch": cursor.epoch, "first": cursor.step, "last": last}
        step = done + last - cursor.step
        outcomes = self._order("steps", {**order, "step": step}, f"steps {done} to {step}")
        shared = self._add_up(step, [one["part"] for one in outcomes], "average", name)
        self._count(cursor.step, last, time.monotonic() - began, outcomes)
        files = [file for one in outcomes for file in one["files"]]
        logs: dict[str, float] = {}
        stop = False
        if last == steps:
            ended = self._end_epoch(cursor.epoch, step, shared, outcomes)
            self._store.drop(step, [shared["name"]])
            (shared,), logs, stop = ended["files"], ended["logs"], ended["stop"]
            for key, value in logs.items():
                self._recorded.history.setdefault(key, []).append(value)
            self._tell("epoch", epoch=cursor.epoch, logs=logs)
        after = Cursor(cursor.epoch + 1, 0) if last == steps else Cursor(cursor.epoch, last)
        return self._commit(after, [{"files": [shared, *files]}], logs), stop

    def _end_epoch(self, epoch: int, step: int, shared: File, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        """Validation in all tasks, then the epoch's metrics and callbacks in one."""
        order: dict[str, Any] = {"step": step, "epoch": epoch, "shared": shared, "validation": None}
        order |= {"own": outcomes[0]["files"][0], "logs": _mean([one["logs"] for one in outcomes]), "val_logs": None}
        if self._job["validation_plan"] is not None:
            parts = self._order("evaluate", {"step": step, "shared": shared}, f"validate epoch {epoch + 1}")
            order["validation"] = self._add_up(step, [one["part"] for one in parts], "validation")
            order["val_logs"] = _mean([one["logs"] for one in parts])
        (ended,) = self._stages.order({"do": "end_epoch", **order}, 1, f"end epoch {epoch + 1}")
        if order["validation"] is not None:
            self._store.drop(step, [order["validation"]["name"]])
        return ended

    def _add_up(self, step: int, parts: list[File], what: str, after: str | None = None) -> File:
        """The file that holds the sum of parts, as a tree of tasks has added them.

        ``after``: the checkpoint that the parts went on from; then the file is the next one's shared weights.
        """
        uri, attempt, outer = self._folder.uri, self._attempt, self._strategy.outer
        level = 0
        while len(parts) > 1 or level == 0:
            groups = [parts[at : at + FAN_IN] for at in range(0, len(parts), FAN_IN)]
            final = after if len(groups) == 1 else None
            label = f"{what}-{level}"

            def work(rank: int, task: int, groups: Any = groups, final: str | None = final, label: str = label) -> File:
                return _sum_of(uri, attempt, step, groups[rank], of_task(f"{label}-{rank}", task), final, outer, task)

            summed = self._stages.call(work, len(groups), f"{what}, step {step}")
            self._store.drop(step, [part["name"] for part in parts])
            self._recorded.bytes_sent += sum(part["size"] for part in parts)
            parts, level = summed, level + 1
        return parts[0]

    def _commit(self, cursor: Cursor, outcomes: list[dict[str, Any]], metrics: dict[str, float]) -> str:
        """Write the manifest of the files that the outcomes name."""
        files = tuple(FileDigest(**file) for one in outcomes for file in one["files"])
        step = cursor.epoch * self._plan.steps_per_epoch + cursor.step
        progress = asdict(self._recorded)
        self._store.commit(Manifest(step, cursor, self._attempt.number, self._replicas, files, metrics, progress))
        self._store.prune(self._job["keep_checkpoints"], best=validation_loss)
        self._tell("checkpoint", step=step)
        speed = self._recorded.timed_rows / max(self._recorded.timed_seconds, 1e-9)
        self._tell("progress", step=step, rows_per_second=speed)
        return self._store.name(step)

    def _count(self, first: int, last: int, seconds: float, outcomes: list[dict[str, Any]]) -> None:
        """Take down a round's time, but not the first one's, in which processes start and trace the model."""
        self._rounds += 1
        if self._rounds == 1:
            return
        self._recorded.timed_rows += self._plan.rows_before(last) - self._plan.rows_before(first)
        self._recorded.timed_seconds += seconds
        for spent, one in zip(self._spent, outcomes, strict=True):
            own = one["input"] + one["compute"] + one["exchange"]
            spent.steps += last - first
            spent.input += one["input"]
            spent.compute += one["compute"]
            spent.exchange += one["exchange"]
            spent.waiting += max(0.0, seconds - own)

    def _order(self, what: str, order: dict[str, Any], name: str) -> list[dict[str, Any]]:
        return self._stages.order({"do": what, **order}, self._replicas, name)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._on_message(Message(0, kind, fields, time.time()))


def _sum_of(
    uri: str, attempt: Attempt, step: int, parts: list[File], name: str, after: str | None, outer: Any, task: int
) -> File:
    """In a task: add up files, and put the sum; with ``after``, what the next round begins from."""
    store = _store(uri, attempt)
    total = combine(store.get(step, FileDigest(**part)) for part in parts)
    if after is not None:
        total = after_round(total, store.open(after).load(MODEL), outer)
        if not state.all_finite(total):
            raise TrainingFailed(
                f"training diverged: a weight is not a finite number after step {step}.",
                fix="The last good checkpoint is kept. Lower the learning rate, or look for wrong values in the "
                "features.",
            )
        name = of_task(MODEL, task)
    return asdict(store.put(step, name, total))


def _store(uri: str, attempt: Attempt) -> CheckpointStore:
    folder = RunFolder(uri)
    return CheckpointStore(uri, attempt.number, lambda: folder.is_current(attempt))


def _mean(logs: list[dict[str, float] | None]) -> dict[str, float] | None:
    """Of logs that are no metrics; None where they are."""
    given = [one for one in logs if one is not None]
    return {name: sum(one[name] for one in given) / len(given) for name in given[0]} if given else None
