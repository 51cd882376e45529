"""One worker's run: the entry that the launcher starts in a process of its own on an executor."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import ConfigError, Diverged, DLOnSparkError
from dl_on_spark.input_pipeline import BlockFeed, Cursor, RankReader, SamplePlan, describe_batch, to_tf_dataset
from dl_on_spark.lake import Schema, Snapshot, Statistics, storage
from dl_on_spark.launch import WorkerContext
from dl_on_spark.sync.base import StepRows, SyncSession, SyncStrategy
from dl_on_spark.training import state
from dl_on_spark.training.callback_state import CallbackState
from dl_on_spark.training.checkpoint import MODEL, Checkpoint, CheckpointStore, FileDigest, Manifest, rank_file
from dl_on_spark.training.keras_loop import fit_worker
from dl_on_spark.training.metrics import load_metric_state, metric_state
from dl_on_spark.training.model_loading import build, check_inputs, load_model_builder, offset_seeds
from dl_on_spark.training.recorded import Recorded, validation_loss
from dl_on_spark.training.run_folder import Attempt, RunFolder, RunRecord
from dl_on_spark.training.step_clock import StepClock

DEFAULT_STEPS_PER_EXECUTION = 32
_PROGRESS_EVERY_S = 0.5


@dataclass(frozen=True)
class WorkerJob:
    """All that a worker needs to know, made by the driver. Tables travel as pinned snapshots, not as rows.

    ``replicas``: how many a run in stages trains; workers that are there at once know it by themselves.
    """

    model: str | Callable[..., Any]
    strategy: SyncStrategy
    snapshot: str
    schema: dict[str, Any]
    statistics: str | None
    validation_snapshot: str | None
    validation_plan: str | None
    callbacks: Callable[[int], list[Any]] | None
    run_folder: str
    record: RunRecord
    attempt: Attempt
    resume_from: str | None
    seed: int
    steps_per_execution: int | None
    checkpoint_every: int | None
    keep_checkpoints: int
    class_weight: dict[int, float] | None = None
    replicas: int = 0


def run(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Train, leave the model in the run folder (rank 0), and return plain values for the driver."""
    job = job_of(payload)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    with Communicator.from_listener(
        context.listener, context.rank, context.peers, context.secret, deadline_s=context.deadline_s
    ) as comm:
        return _Worker(context, job, comm).train()


class _Worker:
    """The parts of one worker's run, and the hook that the step loop calls between its executions."""

    def __init__(self, context: WorkerContext, job: WorkerJob, comm: Communicator) -> None:
        self._context, self._job, self._comm = context, job, comm
        self._rank, self._world = context.rank, context.world_size
        self._plan = SamplePlan.from_json(job.record.plan)
        folder = self._folder = RunFolder(job.run_folder)
        self._store = CheckpointStore(folder.uri, job.attempt.number, lambda: folder.is_current(job.attempt))
        self._recorded = Recorded()
        self._sent_at_start = 0
        self._clock: StepClock | None = None
        self._last_sent = 0.0
        self._model: Any = None
        self._session: SyncSession | None = None
        self._callback_state: CallbackState | None = None
        self._saved_callbacks: state.Arrays = {}

    def train(self) -> dict[str, Any]:
        """Build, restore, fit, save."""
        job, rank, world = self._job, self._rank, self._world
        schema = Schema.from_dict(job.schema)
        keras.utils.set_random_seed(job.seed)
        model = self._model = build(
            load_model_builder(job.model), schema, self._plan, alone=world == 1, weighted=job.class_weight is not None
        )
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(self._reader(job.snapshot, self._plan, schema))
            deadline_s = self._context.deadline_s
            feed = stack.enter_context(BlockFeed(reader.blocks, reader.preprocessor, deadline_s=deadline_s))
            self._clock = StepClock(feed, self._comm)
            validation = self._validation(stack, schema)
            check_inputs(model, reader.preprocessor.feature_names)
            state.build_variables(model, feed.element_spec)
            offset_seeds(model, rank)
            self._agree_on_weights()
            session = self._session = job.strategy.start(model, self._comm, StepRows(self._plan, rank, world))
            stack.callback(session.close)
            start = self._restore(session)
            if rank == 0:
                self._begin(schema)
            self._comm.barrier()  # nobody writes before the folder is this run's
            callbacks = [] if job.callbacks is None else list(job.callbacks(rank))
            self._callback_state = CallbackState(callbacks, self._saved_callbacks)
            with first_cause(reader):
                fit_worker(
                    model,
                    feed,
                    plan=self._plan,
                    comm=self._comm,
                    session=session,
                    epochs=job.record.epochs,
                    start=start,
                    validation=validation,
                    callbacks=[*callbacks, self._callback_state],
                    steps_per_execution=self._steps_per_execution(),
                    hooks=[self],
                    class_weight=job.class_weight,
                    describe=lambda cursor: describe_batch(self._plan, reader.snapshot, cursor, rank, world),
                )
        if rank == 0:
            self._save_model()
        self._comm.barrier()  # nobody leaves before the model is there
        return {
            **asdict(self._recorded),
            "bytes_sent": self._bytes_sent(),
            "seconds": self._clock.spent.as_dict(),
            "epochs": len(next(iter(self._recorded.history.values()), [])),
            "optimizer_steps": int(model.optimizer.iterations.numpy()),
        }

    # What the step loop calls (keras_loop.StepHook).

    def steps_until_due(self, cursor: Cursor) -> int | None:
        """An execution begins: steps until the next checkpoint inside an epoch."""
        assert self._clock is not None
        self._clock.begin()
        every = self._job.checkpoint_every
        return None if every is None else every - self._global_step(cursor) % every

    def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
        """Count, report, and save when a checkpoint is due."""
        assert self._clock is not None
        done, now = self._global_step(cursor), time.monotonic()
        timed = self._clock.count(cursor.epoch, steps, seconds)
        if timed is not None:
            rows = self._plan.rows_before(cursor.step) - self._plan.rows_before(cursor.step - steps)
            self._recorded.timed_rows += rows
            self._recorded.timed_seconds += timed
        self._context.channel.progress(done)
        if self._rank == 0 and now - self._last_sent > _PROGRESS_EVERY_S:
            self._last_sent = now
            speed = self._recorded.timed_rows / max(self._recorded.timed_seconds, 1e-9)
            self._context.channel.send("progress", step=done, rows_per_second=speed)
        every = self._job.checkpoint_every
        if every is not None and done % every == 0 and cursor.step < self._plan.steps_per_epoch:
            assert self._session is not None
            with self._clock.saving():
                self._session.finish_epoch(done)  # replicas agree; a local round ends here
                self._save_checkpoint(cursor, {"metric": metric_state(self._model, self._comm)}, {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Record the metrics of all rows and save; stop where the loss is no number."""
        values = {name: float(value) for name, value in logs.items()}
        if not math.isfinite(values.get("loss", 0.0)):
            raise Diverged(f"training diverged: the loss of epoch {epoch + 1} is {values['loss']}.")
        for name, value in values.items():
            self._recorded.history.setdefault(name, []).append(value)
        if self._rank == 0:
            self._context.channel.send("epoch", epoch=epoch, logs=values)
        assert self._clock is not None
        with self._clock.saving():
            self._save_checkpoint(Cursor(epoch + 1, 0), {}, values)
        self._context.channel.send("pace", epoch=epoch, seconds=self._clock.spent.as_dict())

    def _reader(self, snapshot: str, plan: SamplePlan, schema: Schema) -> RankReader:
        statistics = None if self._job.statistics is None else Statistics.from_json(self._job.statistics)
        return RankReader(
            Snapshot.from_json(snapshot),
            plan,
            schema,
            statistics,
            self._rank,
            self._world,
            threads=max(1, self._context.cpus),
            deadline_s=self._context.deadline_s,
        )

    def _validation(self, stack: contextlib.ExitStack, schema: Schema) -> tf.data.Dataset | None:
        if self._job.validation_snapshot is None or self._job.validation_plan is None:
            return None
        plan = SamplePlan.from_json(self._job.validation_plan)
        reader = stack.enter_context(self._reader(self._job.validation_snapshot, plan, schema))
        return to_tf_dataset(reader, lambda: Cursor(0, 0), cardinality=plan.steps_per_epoch)

    def _agree_on_weights(self) -> None:
        """Rank 0's initial weights: a model may draw them from a source that our seed does not reach."""
        for variable in self._model.weights:
            flat = np.array(variable).reshape(-1)
            self._comm.broadcast(flat, root=0)
            variable.assign(flat.reshape(variable.shape))

    def _begin(self, schema: Schema) -> None:
        """Make the folder this run's: every rank has built its model, nothing is refused any more."""
        self._store.fence()
        files = {"schema.yaml": schema.to_yaml(), "snapshot.json": self._job.snapshot}
        if self._job.statistics is not None:
            files["statistics.json"] = self._job.statistics
        self._folder.begin(self._job.record, files)

    def _steps_per_execution(self) -> int:
        asked = self._job.steps_per_execution or int(getattr(self._model, "steps_per_execution", 1) or 1)
        if asked == 1 and self._job.steps_per_execution is None:
            asked = DEFAULT_STEPS_PER_EXECUTION
        return max(1, min(asked, self._plan.steps_per_epoch))

    def _restore(self, session: SyncSession) -> Cursor:
        """The cursor to start from, with all state of the checkpoint that the driver chose."""
        if self._job.resume_from is None:
            return Cursor(0, 0)
        checkpoint: Checkpoint = self._store.open(self._job.resume_from)
        shared, own = checkpoint.load(MODEL), checkpoint.load_rank(self._rank)
        state.load_weights(self._model, shared)
        state.load_optimizer(self._model, shared if session.replicas_identical else own)
        if checkpoint.manifest.world_size == self._world:
            state.load_random_state(self._model, own)
        session.load_state(state.of_prefix("session", own))
        self._saved_callbacks = state.of_prefix("callbacks", own)
        cursor = checkpoint.manifest.cursor
        session.set_step(self._global_step(cursor))
        metrics = state.of_prefix("metric", shared)
        if metrics:
            load_metric_state(self._model, metrics, self._rank)
        self._recorded = Recorded(**checkpoint.manifest.progress)
        self._sent_at_start = self._recorded.bytes_sent if self._rank == 0 else 0
        return cursor

    def _save_checkpoint(self, cursor: Cursor, extra: dict[str, state.Arrays], metrics: dict[str, float]) -> None:
        """All ranks put their files; rank 0 commits when it knows every digest."""
        assert self._session is not None
        step, optimizer = self._global_step(cursor), state.optimizer_of(self._model)
        own = {**state.random_state_of(self._model), **state.with_prefix("session", self._session.state())}
        if self._callback_state is not None:
            own.update(state.with_prefix("callbacks", self._callback_state.state()))
        if not self._session.replicas_identical:
            own.update(optimizer)
        digests = [self._store.put(step, rank_file(self._rank), own)]
        if self._rank == 0:
            shared = state.weights_of(self._model)
            if not state.all_finite(shared):
                raise Diverged(f"training diverged: a weight is not a finite number after step {step}.")
            if self._session.replicas_identical:
                shared.update(optimizer)
            for prefix, tensors in extra.items():
                shared.update(state.with_prefix(prefix, tensors))
            digests.append(self._store.put(step, MODEL, shared))
        told = json.dumps([asdict(digest) for digest in digests]).encode()
        files = [FileDigest(**file) for one in self._comm.allgather_bytes(told) for file in json.loads(one)]
        if self._rank == 0:
            self._recorded.bytes_sent = self._bytes_sent()
            attempt, progress = self._job.attempt.number, asdict(self._recorded)
            self._store.commit(Manifest(step, cursor, attempt, self._world, tuple(files), metrics, progress))
            self._store.prune(self._job.keep_checkpoints, best=validation_loss)
            self._context.channel.send("checkpoint", step=step)
        self._context.channel.progress(step)

    def _save_model(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.keras"
            self._model.save(file)
            self._store.fence()
            storage.write_bytes(self._folder.path("model.keras"), file.read_bytes())

    def _bytes_sent(self) -> int:
        return self._sent_at_start + self._comm.bytes_sent

    def _global_step(self, cursor: Cursor) -> int:
        return cursor.epoch * self._plan.steps_per_epoch + cursor.step


def job_of(payload: bytes) -> WorkerJob:
    """What our own driver pickled, delivered by Spark as it delivers tasks."""
    try:
        return WorkerJob(**pickle.loads(payload))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the worker cannot load the model function or the callbacks ({error}).",
            fix="Ship their module with --py-files (dl-on-spark package --include FOLDER).",
        ) from error


@contextlib.contextmanager
def first_cause(reader: RankReader) -> Iterator[None]:
    """TensorFlow turns an error of the reader into text; raise the reader's own instead."""
    try:
        yield
    except DLOnSparkError:
        raise
    except Exception as error:
        if reader.failure is not None:
            raise reader.failure from error
        raise
