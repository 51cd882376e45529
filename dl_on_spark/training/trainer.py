"""The driver's side of a training run: check, pin, plan, launch, restart, result."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dl_on_spark.errors import Cancelled, ConfigError, InputError, SchemaError, TrainingFailed, WorkerFailed
from dl_on_spark.input_pipeline import SamplePlan
from dl_on_spark.lake import Schema, Snapshot, Statistics, Table, compute_statistics
from dl_on_spark.launch import LaunchRequest, Message, input_error, launch, preflight
from dl_on_spark.sync import StageAveraging, SyncStrategy, parse_sync
from dl_on_spark.training.arguments import check_numbers, check_objects
from dl_on_spark.training.checkpoint import CheckpointStore
from dl_on_spark.training.class_weights import check_class_weight
from dl_on_spark.training.progress import TrainingProgress
from dl_on_spark.training.result import TrainingResult
from dl_on_spark.training.run_folder import RunFolder, RunRecord
from dl_on_spark.training.run_lock import RunLock
from dl_on_spark.training.stage_driver import ENTRY as STAGE_ENTRY
from dl_on_spark.training.stage_driver import train_in_stages
from dl_on_spark.training.stragglers import Paces

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_ENTRY = "dl_on_spark.training.worker:run"
_KEEP_CHECKPOINTS = 3
Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class Trainer:
    """Trains a Keras model on a table with ``num_workers`` workers.

    ``model``: ``"module:function"`` or a callable that returns a compiled `keras.Model`; it gets ``schema``,
    ``global_batch_size`` and ``steps_per_epoch`` if it has a parameter of that name. ``sync``: a strategy, or
    its text such as ``"local_sgd:every=16"``. ``checkpoint_dir``: the folder of this run, which driver and
    executors can write. ``max_restarts``: how often a failed run is started again from its last checkpoint.
    ``deadline_s``: longest silence of a worker. ``checkpoint_every``: steps between checkpoints inside an
    epoch (epoch ends always have one).
    """

    model: str | Callable[..., Any]
    sync: str | SyncStrategy = "allreduce"
    num_workers: int = 1
    gpus_per_worker: int = 0
    cpus_per_worker: int | None = None
    checkpoint_dir: str = "checkpoints"
    max_restarts: int = 3
    deadline_s: float = 600.0
    checkpoint_every: int | None = None

    def fit(
        self,
        spark: SparkSession,
        table: Table,
        *,
        schema: Schema,
        validation: Table | float | None = None,
        global_batch_size: int = 4096,
        epochs: int = 1,
        seed: int = 7,
        resume: Resume = "auto",
        callbacks: Callable[[int], list[Any]] | None = None,
        statistics: Statistics | None = None,
        steps_per_execution: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        quiet: bool = False,
    ) -> TrainingResult:
        """Train for `epochs` epochs and leave the model in ``checkpoint_dir``.

        ``validation``: a table, or the share of row groups to hold out. ``global_batch_size``: rows of one
        optimizer step over all workers. ``resume``: "auto" continues a run of the same data, schema,
        strategy, seed and model, and starts afresh otherwise; "must" fails instead; "never" starts afresh.
        A finished run is not trained again for the same or fewer epochs: its result is returned.
        ``callbacks``: called with the rank on every worker. ``steps_per_execution``: steps of one
        `tf.function` call (default: the compiled model's, or 32). ``class_weight``: how much a row counts in
        the loss by the class of its label, as in Keras's `fit`.

        Raises an `InputError` before or at launch for input that cannot be trained on, or where another trainer
        is at work on the run, `TrainingFailed` with the first cause after ``max_restarts`` restarts, `Cancelled`
        when stopped.
        """
        strategy = parse_sync(self.sync)
        check_objects(self.model, table, schema, validation, callbacks, resume)
        check_numbers(
            self.deadline_s,
            epochs=(epochs, 1),
            global_batch_size=(global_batch_size, 0),
            seed=(seed, 0),
            num_workers=(self.num_workers, 1),
            max_restarts=(self.max_restarts, 0),
            gpus_per_worker=(self.gpus_per_worker, 0),
            cpus_per_worker=(self.cpus_per_worker, 1),
            checkpoint_every=(self.checkpoint_every, 1),
            steps_per_execution=(steps_per_execution, 1),
        )
        check_class_weight(class_weight, schema)
        strategy.check(self.num_workers)
        snapshot, held_out = _pin(spark, table, schema, validation)
        plan = SamplePlan.create(
            snapshot.row_groups.rows, num_workers=self.num_workers, global_batch_size=global_batch_size, seed=seed
        )
        validation_plan = None if held_out is None else self._validation_plan(held_out, global_batch_size)
        folder = RunFolder(str(self.checkpoint_dir))
        folder.check_writable()
        with RunLock(folder) as lock:
            identity = _identity(snapshot, held_out, schema, strategy, self.model, global_batch_size, seed)
            identity["class_weight"] = None if class_weight is None else sorted(map(list, class_weight.items()))
            stored = _stored_run(folder, identity, resume)
            if stored is not None:
                done = folder.result()
                if done is not None and stored.epochs >= epochs:
                    logger.info("%s holds the finished run: nothing to train.", folder.uri)
                    return done
                plan = self._same_batches(SamplePlan.from_json(stored.plan))
            preflight(
                spark,
                self.num_workers,
                gpus_per_worker=self.gpus_per_worker,
                cpus_per_worker=self.cpus_per_worker,
                readable=[snapshot.uri],
                writable=[folder.uri],
                barrier=not isinstance(strategy, StageAveraging),
            )
            if statistics is None and stored is not None:
                statistics = folder.statistics()
            if statistics is None:
                statistics = _statistics(spark, snapshot, schema)
            _refuse_nulls(statistics, snapshot.uri)
            record = RunRecord(identity, plan.to_json(), epochs)
            if stored is not None:
                record = replace(record, id=stored.id)
            job = {
                "model": self.model,
                "strategy": strategy,
                "snapshot": snapshot.to_json(),
                "schema": schema.to_dict(),
                "statistics": statistics.to_json(),
                "validation_snapshot": None if held_out is None else held_out.to_json(),
                "validation_plan": None if validation_plan is None else validation_plan.to_json(),
                "callbacks": callbacks,
                "run_folder": folder.uri,
                "record": record,
                "seed": seed,
                "steps_per_execution": steps_per_execution,
                "checkpoint_every": self.checkpoint_every,
                "keep_checkpoints": _KEEP_CHECKPOINTS,
                "class_weight": None if class_weight is None else dict(class_weight),
            }
            lock.check_alone()
            with TrainingProgress(epochs * plan.steps_per_epoch, plan.steps_per_epoch, quiet=quiet) as progress:
                outcomes, restarts = self._run_attempts(spark, folder, lock, record, job, progress)
            result = _result(folder, outcomes, restarts, self.num_workers, plan)
            folder.write("result.json", result.to_json())
            folder.event("finished", steps=result.steps, metrics=result.metrics)
            return result

    def _run_attempts(
        self,
        spark: SparkSession,
        folder: RunFolder,
        lock: RunLock,
        record: RunRecord,
        job: dict[str, Any],
        progress: TrainingProgress,
    ) -> tuple[list[dict[str, Any]], int]:
        """Launch, and launch again from the last checkpoint after a failure that may not repeat."""
        restarts = 0
        while True:
            attempt = folder.next_attempt()
            is_current = functools.partial(folder.is_current, attempt)
            resume_from = None
            # Until the workers begin this run, the folder may hold the checkpoints of another one.
            if folder.holds(record):
                checkpoint = CheckpointStore(folder.uri, attempt.number, is_current).latest()
                if checkpoint is not None:
                    resume_from = checkpoint.folder.rsplit("/", 1)[-1]
                    progress.note(f"resuming from step {checkpoint.manifest.step} ({resume_from})")
            folder.event("attempt", attempt=attempt.number, workers=self.num_workers, resume_from=resume_from)
            given = {**job, "attempt": attempt, "resume_from": resume_from, "replicas": self.num_workers}
            in_stages = isinstance(job["strategy"], StageAveraging)
            carry_out = functools.partial(train_in_stages, job=given) if in_stages else launch
            request = LaunchRequest(
                num_workers=self.num_workers,
                entry=STAGE_ENTRY if in_stages else _ENTRY,
                payload=_dumps(given),
                attempt=attempt.number,
                gpus_per_worker=self.gpus_per_worker,
                cpus_per_worker=self.cpus_per_worker,
                deadline_s=self.deadline_s,
            )
            listener = _Listener(folder, lock, progress, Paces(self.num_workers))
            try:
                outcomes = carry_out(spark, request, listener.hear)
            except InputError:
                folder.give_up(attempt)
                raise
            except Cancelled:
                folder.event("cancelled", attempt=attempt.number)
                raise
            except WorkerFailed as error:
                folder.event("failed", attempt=attempt.number, rank=error.rank, host=error.host, message=error.message)
                if not is_current():
                    raise _taken_over(folder) from error
                if not error.retryable:
                    raise TrainingFailed(
                        error.message, fix=error.fix or "Mend what the traceback names, then run the same command."
                    ) from error
                if restarts >= self.max_restarts:
                    raise TrainingFailed(
                        f"training failed after {restarts} restarts (max_restarts={self.max_restarts}). "
                        f"{error.message}",
                        fix=error.fix or "Mend the cause; the same command resumes from the last checkpoint.",
                    ) from error
                restarts += 1
                progress.note(f"{error.message} Restart {restarts} of {self.max_restarts}.")
            else:
                if not is_current():
                    raise _taken_over(folder)
                return outcomes, restarts

    def _validation_plan(self, held_out: Snapshot, global_batch_size: int) -> SamplePlan:
        try:
            return SamplePlan.create(
                held_out.row_groups.rows,
                num_workers=self.num_workers,
                global_batch_size=max(global_batch_size, self.num_workers),
                seed=None,
            )
        except InputError as error:
            raise InputError(f"validation: {error.message}", fix=error.fix) from error

    def _same_batches(self, plan: SamplePlan) -> SamplePlan:
        """The stored plan, whose global batches any worker count up to its shards can serve."""
        if self.num_workers > plan.canonical_shards:
            raise ConfigError(
                f"the run was planned for at most {plan.canonical_shards} workers; num_workers={self.num_workers}.",
                fix=f"Resume with at most {plan.canonical_shards} workers, or start afresh with resume='never'.",
            )
        return plan


def _pin(
    spark: SparkSession, table: Table, schema: Schema, validation: Table | float | None
) -> tuple[Snapshot, Snapshot | None]:
    """Snapshots of training and validation rows; both checked against the schema."""
    snapshot = table.snapshot(spark)
    schema.check(snapshot.schema, snapshot.uri, schema.feed_columns)
    if validation is None:
        return snapshot, None
    if isinstance(validation, Table):
        held_out = validation.snapshot(spark)
        schema.check(held_out.schema, held_out.uri, schema.feed_columns)
        return snapshot, held_out
    if not 0 < validation < 1:
        raise ConfigError(f"validation={validation}.", fix="Give a table, or a share between 0 and 1.")
    return _split(snapshot, validation)


def _split(snapshot: Snapshot, share: float) -> tuple[Snapshot, Snapshot]:
    """Hold out about `share` of the rows as whole row groups, the same ones for the same table."""
    rows = snapshot.row_groups.rows
    if len(rows) < 2:
        raise ConfigError(
            f"{snapshot.uri} has one row group, which cannot be split for validation={share}.",
            fix="Give a table as validation: table.where(...), by day for instance.",
        )
    order = np.random.default_rng(0).permutation(len(rows))
    count = int(np.searchsorted(np.cumsum(rows[order]), share * rows.sum())) + 1
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[order[: min(count, len(rows) - 1)]] = True
    return _groups(snapshot, ~chosen), _groups(snapshot, chosen)


def _groups(snapshot: Snapshot, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Snapshot:
    groups = snapshot.row_groups
    digest = hashlib.sha256(snapshot.digest.encode() + np.packbits(chosen).tobytes()).hexdigest()
    return replace(snapshot, row_groups=groups.some(chosen), digest=digest)


def _statistics(spark: SparkSession, snapshot: Snapshot, schema: Schema) -> Statistics:
    """As `compute_statistics`, but bad input that a task finds is an `InputError` here, not Spark's error."""
    try:
        return compute_statistics(spark, snapshot, schema)
    except InputError:
        raise
    except Exception as error:
        found = input_error(error)
        if found is None:
            raise
        raise found from error


def _refuse_nulls(statistics: Statistics, uri: str) -> None:
    """Before anything is written: a worker would find them in the middle of an epoch."""
    for name, nulls in statistics.refused_nulls.items():
        raise SchemaError(
            f"{uri}: column {name!r} has {nulls:,} nulls or NaN among {statistics.rows:,} rows.",
            fix="Give it a policy in the schema (nulls: indicator, or nulls: {fill: VALUE}), or remove these rows "
            "in the ETL.",
        )


def _identity(
    snapshot: Snapshot,
    held_out: Snapshot | None,
    schema: Schema,
    strategy: SyncStrategy,
    model: str | Callable[..., Any],
    global_batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """What must be equal for a run to be continued; the number of workers and of epochs may change."""
    name = model if isinstance(model, str) else f"{model.__module__}:{getattr(model, '__qualname__', model)}"
    return {
        "snapshot": snapshot.fingerprint,
        "validation": None if held_out is None else held_out.fingerprint,
        "schema": hashlib.sha256(schema.to_yaml().encode()).hexdigest()[:16],
        "sync": str(strategy),
        "model": name,
        "global_batch_size": global_batch_size,
        "seed": seed,
    }


def _stored_run(folder: RunFolder, identity: dict[str, Any], resume: str) -> RunRecord | None:
    """The run to continue; None to start afresh."""
    if resume == "never":
        return None
    try:
        stored = folder.record()
    except ConfigError as error:
        if resume == "must":
            raise
        logger.warning("%s Starting afresh.", error.message)
        return None
    if stored is None:
        if resume == "auto":
            return None
        raise ConfigError(f"{folder.uri} holds no run to resume.", fix="Use resume='auto' to start one.")
    different = [key for key, value in identity.items() if stored.identity.get(key) != value]
    if not different:
        return stored
    if resume == "must":
        raise ConfigError(
            f"{folder.uri} holds another run: {', '.join(different)} differ.",
            fix="Use another checkpoint_dir, or resume='never' to replace that run.",
        )
    logger.warning("%s holds another run (%s differ): starting afresh.", folder.uri, ", ".join(different))
    return None


def _taken_over(folder: RunFolder) -> TrainingFailed:
    """Never restart then: two trainers must not write one run."""
    return TrainingFailed(
        f"another trainer has taken over the run in {folder.uri}; this one stops.",
        fix="Wait for the other one, or give each run its own checkpoint_dir.",
    )


def _dumps(job: dict[str, Any]) -> bytes:
    """The workers' job; functions of the user's program travel by value, as Spark's own do."""
    from pyspark import cloudpickle

    data: bytes = cloudpickle.dumps(job)
    return data


@dataclass(frozen=True)
class _Listener:
    """Takes in what the workers of one attempt say."""

    folder: RunFolder
    lock: RunLock
    progress: TrainingProgress
    paces: Paces

    def hear(self, message: Message) -> None:
        self.lock.check_held()
        fields = message.fields
        if message.kind == "progress":
            self.progress.steps(fields["step"], fields["rows_per_second"])
        elif message.kind == "epoch":
            self.folder.event("epoch", epoch=fields["epoch"], logs=fields["logs"])
            self.progress.epoch(fields["epoch"], fields["logs"])
        elif message.kind == "pace":
            late = self.paces.add(message.rank, fields["epoch"], fields["seconds"])
            if late is not None:
                self._name_slowest(fields["epoch"], *late)
        elif message.kind == "checkpoint":
            self.folder.event("checkpoint", step=fields["step"])
        elif message.kind == "log":
            self.progress.note(f"worker {message.rank}: {fields.get('text', '')}")

    def _name_slowest(self, epoch: int, rank: int, factor: float) -> None:
        self.folder.event("slow_worker", epoch=epoch, rank=rank, factor=round(factor, 2))
        self.progress.note(f"worker {rank} takes {factor:.2f} times as long for a step as the others: look at its host")


def _result(
    folder: RunFolder, outcomes: list[dict[str, Any]], restarts: int, workers: int, plan: SamplePlan
) -> TrainingResult:
    first = outcomes[0]
    history: dict[str, list[float]] = first["history"]
    return TrainingResult(
        history=history,
        metrics={name: values[-1] for name, values in history.items() if values},
        model_path=folder.path("model.keras"),
        run_dir=folder.uri,
        rows_per_second=first["timed_rows"] / first["timed_seconds"] if first["timed_seconds"] else 0.0,
        bytes_sent=sum(outcome["bytes_sent"] for outcome in outcomes),
        restarts=restarts,
        steps=first["optimizer_steps"],
        epochs=first["epochs"],
        workers=workers,
        rows_per_epoch=plan.rows,
        seconds=first["timed_seconds"],
        seconds_by_rank=[outcome["seconds"] for outcome in outcomes],
    )
