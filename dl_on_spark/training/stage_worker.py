"""What a task of `StageAveraging` does: steps of one replica, its part of the validation, or an epoch's end.

The entry that a stage's process serves. Every order names the files to begin from and gives the files that came of
it: between two orders the process keeps the traced model and the open reader, but no state of a replica.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import ConfigError, TrainingFailed
from dl_on_spark.input_pipeline import BlockFeed, Cursor, RankReader, SamplePlan, to_tf_dataset
from dl_on_spark.lake import Schema, Snapshot, Statistics, storage
from dl_on_spark.launch.stage_child import StageContext
from dl_on_spark.sync.base import StepRows, running_statistics
from dl_on_spark.training import state
from dl_on_spark.training.callback_state import CallbackState
from dl_on_spark.training.checkpoint import MODEL, CheckpointStore, FileDigest, of_task, rank_file
from dl_on_spark.training.keras_loop import steps_function
from dl_on_spark.training.metrics import count_outputs_by_rows, load_metric_total, metric_parts
from dl_on_spark.training.model_loading import build, check_inputs, load_model_builder, offset_seeds
from dl_on_spark.training.run_folder import STAGES_OPEN, RunFolder
from dl_on_spark.training.worker import DEFAULT_STEPS_PER_EXECUTION, WorkerJob, first_cause, job_of

_BATCH_HOOKS = [f"on_{kind}batch_{when}" for kind in ("", "train_", "test_") for when in ("begin", "end")]

Order = dict[str, Any]


def serve(context: StageContext, payload: bytes) -> StageWorker:
    """The entry of the process."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    return StageWorker(context, job_of(payload))


class StageWorker:
    """The model, built and traced once, and what each order makes of it."""

    def __init__(self, context: StageContext, job: WorkerJob) -> None:
        self._context, self._job = context, job
        self._plan = SamplePlan.from_json(job.record.plan)
        folder = self._folder = RunFolder(job.run_folder)
        self._store = CheckpointStore(folder.uri, job.attempt.number, lambda: folder.is_current(job.attempt))
        self._schema = Schema.from_dict(job.schema)
        keras.utils.set_random_seed(job.seed)
        model = self._model = build(
            load_model_builder(job.model),
            self._schema,
            self._plan,
            alone=job.replicas == 1,
            weighted=job.class_weight is not None,
        )
        self._reader = self._open(job.snapshot, self._plan, 0)
        self._feed = BlockFeed(
            lambda epoch, step: self._reader.blocks(epoch, step),  # noqa: PLW0108 - another reader for another rank
            self._reader.preprocessor,
            deadline_s=context.deadline_s,
        )
        check_inputs(model, self._reader.preprocessor.feature_names)
        state.build_variables(model, self._feed.element_spec)
        count_outputs_by_rows(model)
        session = job.strategy.start(model, Communicator.connect(0, 1, ""), StepRows(self._plan, 0, 1))
        self._steps_of = steps_function(model, session, self._feed.block_spec, job.class_weight)
        self._fresh = {**state.random_state_of(model), **state.optimizer_of(model)}
        self._trained = {id(v) for v in model.trainable_weights}
        self._following = {id(v) for v in running_statistics(model)}
        asked = job.steps_per_execution or int(getattr(model, "steps_per_execution", 1) or 1)
        self._per_execution = asked if asked > 1 or job.steps_per_execution else DEFAULT_STEPS_PER_EXECUTION

    def wanted(self) -> bool:
        """Whether the run's driver is still there to give orders."""
        return self._folder.read(STAGES_OPEN) == self._job.attempt.token.encode()

    def serve(self, order: Order) -> Order:
        """Do what ``order["do"]`` says."""
        began = time.monotonic()
        found: Order = getattr(self, f"_do_{order['do']}")(order)
        return {**found, "total_s": time.monotonic() - began}

    def _do_check(self, order: Order) -> Order:
        """All is built, nothing was refused; the callbacks too."""
        self._callbacks(order["rank"], {}, 0)
        return {}

    def _do_begin(self, order: Order) -> Order:
        """The state of every replica before the first step; the weights are replica 0's."""
        rank, task = order["rank"], order["task"]
        self._set_fresh(rank)
        own = {**state.random_state_of(self._model), **state.optimizer_of(self._model)}
        files = [self._store.put(0, of_task(rank_file(rank), task), own)]
        if rank == 0:
            files.append(self._store.put(0, of_task(MODEL, task), state.weights_of(self._model)))
        return {"files": [asdict(file) for file in files]}

    def _do_steps(self, order: Order) -> Order:
        """Steps ``first`` to ``last`` (exclusive) of an epoch; leaves its state and its part of the average."""
        rank, task, world = order["rank"], order["task"], self._job.replicas
        model, epoch, first, last = self._model, order["epoch"], order["first"], order["last"]
        before = epoch * self._plan.steps_per_epoch
        began = time.monotonic()
        checkpoint = self._store.open(order["from"])
        shared, own = checkpoint.load(MODEL), checkpoint.load_rank(rank)
        self._restore(shared, own, rank, same_world=checkpoint.manifest.world_size == world)
        if first == 0:
            model.reset_metrics()
            if "rate" in shared:  # as callbacks left it
                model.optimizer.learning_rate = float(shared["rate"])
            self._callbacks(rank, shared, epoch)
        elif rank == 0:
            load_metric_total(model, state.of_prefix("metric", shared), state.of_prefix("stack", shared))
        else:
            model.reset_metrics()
        loaded, waited = time.monotonic(), self._feed.seconds_waiting
        logs = self._train(epoch, first, last, rank)
        trained = time.monotonic()
        step = before + last
        after = {**state.random_state_of(model), **state.optimizer_of(model)}
        files = [self._store.put(step, of_task(rank_file(rank), task), after)]
        share = StepRows(self._plan, rank, world).share(before + first, step)
        part = self._store.put(step, of_task(f"part-{rank:04d}.safetensors", task), self._part(share, rank))
        waited = self._feed.seconds_waiting - waited
        return {
            "files": [asdict(file) for file in files],
            "part": asdict(part),
            "logs": logs,
            "updates": int(model.optimizer.iterations.numpy()),
            "input": waited,
            "compute": trained - loaded - waited,
            "exchange": loaded - began + time.monotonic() - trained,
        }

    def _do_evaluate(self, order: Order) -> Order:
        """This rank's part of the validation's metrics."""
        job, rank = self._job, order["rank"]
        assert job.validation_snapshot is not None
        assert job.validation_plan is not None
        state.load_weights(self._model, self._shared(order))
        plan = SamplePlan.from_json(job.validation_plan)
        with self._open(job.validation_snapshot, plan, rank) as reader, first_cause(reader):
            rows = to_tf_dataset(reader, lambda: Cursor(0, 0), cardinality=plan.steps_per_epoch)
            alive = keras.callbacks.LambdaCallback()
            alive.on_test_batch_end = lambda batch, logs=None: self._context.alive()
            logs = self._model.evaluate(rows, verbose=0, return_dict=True, callbacks=[alive])
        name = of_task(f"validation-{rank:04d}.safetensors", order["task"])
        part = self._store.put(order["step"], name, metric_parts(self._model))
        return {"part": asdict(part), "logs": self._own_logs(logs)}

    def _do_end_epoch(self, order: Order) -> Order:
        """The epoch's metrics of all rows, and what callbacks make of them; one task does it."""
        model, epoch, step = self._model, order["epoch"], order["step"]
        shared = self._shared(order)
        callbacks, kept = self._callbacks(0, shared, epoch)
        # After their begin of the epoch, whose effect on the model is in the replica's state already.
        self._restore(shared, self._store.get(step, FileDigest(**order["own"])), 0, same_world=True)
        logs = self._totals(state.of_prefix("metric", shared), state.of_prefix("stack", shared), order["logs"])
        if order["validation"] is not None:
            total = self._store.get(step, FileDigest(**order["validation"]))
            found = self._totals(state.of_prefix("sum", total), state.of_prefix("stack", total), order["val_logs"])
            logs.update({f"val_{name}": value for name, value in found.items()})
        model.stop_training = False
        for callback in callbacks:
            callback.on_epoch_end(epoch, logs)
        values = {name: float(value) for name, value in logs.items()}
        if not math.isfinite(values.get("loss", 0.0)):
            raise TrainingFailed(
                f"training diverged: the loss of epoch {epoch + 1} is {values['loss']}.",
                fix="The last good checkpoint is kept. Lower the learning rate, or look for wrong values in the "
                "features.",
            )
        velocity = {name: value for name, value in shared.items() if name.startswith("velocity/")}
        after = {**state.weights_of(model), **velocity, **state.with_prefix("callbacks", kept.state())}
        rate = model.optimizer._learning_rate
        if isinstance(rate, keras.Variable):
            after["rate"] = np.array(rate)
        file = self._store.put(step, of_task(MODEL, order["task"]), after)
        return {"files": [asdict(file)], "logs": values, "stop": bool(model.stop_training)}

    def _do_save(self, order: Order) -> Order:
        """The published model."""
        checkpoint = self._store.open(order["from"])
        shared = checkpoint.load(MODEL)
        self._restore(shared, checkpoint.load_rank(0), 0, same_world=True)
        callbacks, _ = self._callbacks(0, shared, None)
        for callback in callbacks:
            callback.on_train_end({})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.keras"
            self._model.save(file)
            self._store.fence()
            storage.write_bytes(self._folder.path("model.keras"), file.read_bytes())
        return {"updates": int(self._model.optimizer.iterations.numpy())}

    def _train(self, epoch: int, first: int, last: int, rank: int) -> dict[str, float] | None:
        """Run the steps; the last one's logs where they are not the model's metrics."""
        if self._reader.rank != rank:
            self._reader.close()
            self._reader = self._open(self._job.snapshot, self._plan, rank)
        logs: Any = None
        with first_cause(self._reader):
            self._feed.seek(Cursor(epoch, first))
            done = first
            while done < last:
                block, at, taken = self._feed.take(min(self._per_execution, last - done))
                logs = self._steps_of(block, tf.constant(at), tf.constant(taken))
                done += taken
                self._context.alive()
        return self._own_logs(logs)

    def _part(self, share: float, rank: int) -> state.Arrays:
        """Weights times this replica's share of the rows, and its metrics."""
        found = metric_parts(self._model)
        for variable, (name, value) in zip(self._model.weights, state.weights_of(self._model).items(), strict=True):
            kind = "trained" if id(variable) in self._trained else "mean" if id(variable) in self._following else ""
            if kind:
                wide = np.dtype(np.float64 if value.dtype == np.float64 else np.float32)
                found[f"{kind}/{name}"] = value.astype(wide) * wide.type(share)
            elif rank == 0:
                found[f"first/{name}"] = value
        return found

    def _restore(self, shared: Mapping[str, Any], own: Mapping[str, Any], rank: int, *, same_world: bool) -> None:
        self._set_fresh(rank)
        state.load_weights(self._model, shared)
        state.load_optimizer(self._model, own)
        if same_world:
            state.load_random_state(self._model, own)

    def _set_fresh(self, rank: int) -> None:
        """Random state and optimizer as before the first step of this replica."""
        state.load_random_state(self._model, self._fresh)
        state.load_optimizer(self._model, self._fresh)
        offset_seeds(self._model, rank)

    def _callbacks(
        self, rank: int, shared: Mapping[str, Any], epoch: int | None
    ) -> tuple[list[keras.callbacks.Callback], CallbackState]:
        """The user's callbacks as they were after the epoch before; in ``epoch``, if one is given."""
        callbacks = [] if self._job.callbacks is None else list(self._job.callbacks(rank))
        for callback in callbacks:
            for hook in _BATCH_HOOKS:
                if hook in vars(callback) or getattr(type(callback), hook) is not getattr(
                    keras.callbacks.Callback, hook
                ):
                    raise ConfigError(
                        f"stage_averaging calls callbacks between epochs only; {type(callback).__name__} has {hook}.",
                        fix="Leave that callback out, or use local_sgd, whose workers run Keras's fit.",
                    )
        kept = CallbackState(callbacks, state.of_prefix("callbacks", shared))
        for callback in [*callbacks, kept]:
            callback.set_params({"verbose": 0, "epochs": self._job.record.epochs, "steps": self._plan.steps_per_epoch})
            callback.set_model(self._model)
            callback.on_train_begin({})
        for callback in callbacks if epoch is not None else []:
            callback.on_epoch_begin(epoch, {})
        return callbacks, kept

    def _totals(self, sums: state.Arrays, stacks: state.Arrays, logs: dict[str, float] | None) -> dict[str, float]:
        if logs is not None:
            return dict(logs)
        load_metric_total(self._model, sums, stacks)
        return {name: float(np.asarray(value)) for name, value in self._model.get_metrics_result().items()}

    def _own_logs(self, logs: Any) -> dict[str, float] | None:
        """Logs of a custom step that are not the model's metrics, as Keras tells them apart; None where they are."""
        if not isinstance(logs, dict) or set(logs) == set(self._model.get_metrics_result()):
            return None
        return {name: float(np.asarray(value)) for name, value in logs.items()}

    def _shared(self, order: Order) -> state.Arrays:
        return self._store.get(order["step"], FileDigest(**order["shared"]))

    def _open(self, snapshot: str, plan: SamplePlan, rank: int) -> RankReader:
        statistics = None if self._job.statistics is None else Statistics.from_json(self._job.statistics)
        return RankReader(
            Snapshot.from_json(snapshot),
            plan,
            self._schema,
            statistics,
            rank,
            self._job.replicas,
            threads=max(1, self._context.cpus),
            deadline_s=self._context.deadline_s,
        )


def _refuse_batch_hooks(callback: keras.callbacks.Callback) -> None:
    for hook in _BATCH_HOOKS:
        if hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook):
            raise ConfigError(
                f"stage_averaging calls callbacks between epochs only; {type(callback).__name__} has {hook}.",
                fix="Leave that callback out, or use local_sgd, whose workers run Keras's fit.",
            )
