"""Keras's own `fit`, with a step loop of ours beneath it.

Keras's `fit` runs: callbacks, metrics, validation, a custom ``train_step`` stay as they are. Its train
function is replaced: several steps run in one `tf.function` whose ``tf.range`` loop calls
``model.train_step``; between two calls the strategy may exchange and hooks may save. (Keras's own
multi-step function costs about 3 ms a step as soon as a ``numpy_function`` is in it.)

Keras is given a dataset of step numbers alone, so it counts an epoch's steps right, also in a resumed epoch;
rows come in blocks of steps from a `BlockFeed`, which begins where the cursor says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import Diverged
from dl_on_spark.input_pipeline import BlockFeed, Cursor, SamplePlan
from dl_on_spark.input_pipeline.block_feed import step_of
from dl_on_spark.sync.base import SyncSession
from dl_on_spark.training.class_weights import weigh_classes
from dl_on_spark.training.metrics import count_outputs_by_rows, merge_over_ranks, metric_variables


class StepHook(Protocol):
    """What the loop calls on every rank, at the same steps."""

    def steps_until_due(self, cursor: Cursor) -> int | None:
        """Steps until the hook wants to be called; None: it takes what comes."""

    def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
        """`steps` steps were done; `cursor` is after them, its step may be the epoch's number of steps."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Metrics of all rows, after validation and the user's callbacks."""


def fit_worker(
    model: keras.Model,
    feed: BlockFeed,
    *,
    plan: SamplePlan,
    comm: Communicator,
    session: SyncSession,
    epochs: int,
    start: Cursor,
    validation: tf.data.Dataset | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    steps_per_execution: int = 32,
    hooks: Sequence[StepHook] = (),
    class_weight: Mapping[int, float] | None = None,
    describe: Callable[[Cursor], str] | None = None,
) -> dict[str, list[float]]:
    """Run `fit` on this rank from `start` to the end of epoch `epochs`; returns Keras's history.

    An error of the exchange or of a hook is raised as it is, not as TensorFlow's text of it. Raises `Diverged` at the
    end of the execution in which the loss stopped being a number; ``describe`` says which rows a step's batch has.
    """
    loop = _StepLoop(model, feed, plan, session, start, steps_per_execution, hooks, class_weight, describe)
    uncount, unmerge = count_outputs_by_rows(model), merge_over_ranks(model, comm)
    before = model.steps_per_execution
    model.steps_per_execution = steps_per_execution
    # On the instance: Keras's `fit` asks for a train function and gets ours.
    object.__setattr__(model, "make_train_function", lambda force=False: None)
    model.train_function = loop.execute
    try:
        history = model.fit(
            tf.data.Dataset.range(plan.steps_per_epoch),
            epochs=epochs,
            initial_epoch=start.epoch,
            validation_data=validation,
            callbacks=[_StrategyMetrics(session), *callbacks, _AfterCallbacks(loop, hooks)],
            shuffle=False,  # the plan shuffles
            verbose=0,
        )
    except Exception as error:
        if session.failure is not None:
            raise session.failure from error
        raise
    finally:
        object.__delattr__(model, "make_train_function")
        model.train_function = None
        model.steps_per_execution = before
        unmerge()
        uncount()
    found: dict[str, list[float]] = history.history
    return found


class _StepLoop:
    """Our train function: `execute` stands for one of Keras's executions of several steps."""

    def __init__(
        self,
        model: keras.Model,
        feed: BlockFeed,
        plan: SamplePlan,
        session: SyncSession,
        start: Cursor,
        steps_per_execution: int,
        hooks: Sequence[StepHook],
        class_weight: Mapping[int, float] | None,
        describe: Callable[[Cursor], str] | None,
    ) -> None:
        self._describe = describe
        self._model, self._feed, self._plan, self._session = model, feed, plan, session
        self._cursor, self._per_execution, self._hooks = start, steps_per_execution, hooks
        self._position = 0  # Keras's step in the epoch
        self._in_epoch = False
        # Keras resets metrics when an epoch begins; those of a resumed epoch are put back then.
        self._metrics = [np.array(v) for v in metric_variables(model)] if start.step else []
        self._steps = steps_function(model, session, feed.block_spec, class_weight)

    def execute(self, _iterator: Any) -> Any:
        """Run the steps of one execution that are still to be done, and return the last step's logs."""
        steps = self._plan.steps_per_epoch
        if self._position >= steps:
            self._position, self._in_epoch = 0, False
        last = min(self._position + self._per_execution, steps)
        if not self._in_epoch:
            for variable, value in zip(metric_variables(self._model), self._metrics, strict=False):
                variable.assign(value)
            self._metrics = []
            self._feed.seek(self._cursor)
            self._in_epoch = True
        logs: Any = None
        while self._cursor.step < last:
            logs = self._run(last)
        self._position = last
        if last == steps:
            self._cursor = Cursor(self._cursor.epoch + 1, 0)
        # Done before the run was resumed: nothing to run, the metrics so far.
        return self._model.get_metrics_result() if logs is None else logs

    def leave_epoch(self) -> None:
        """Training stops here, on all ranks: in the middle of an epoch the replicas have yet to agree."""
        cursor = self._cursor
        if cursor.step:
            self._session.finish_epoch(cursor.epoch * self._plan.steps_per_epoch + cursor.step)

    def _run(self, last: int) -> Any:
        """As many steps as fit before the next exchange, hook or the execution's end."""
        cursor, began = self._cursor, time.perf_counter()
        done = cursor.epoch * self._plan.steps_per_epoch + cursor.step
        self._session.before_steps(done)
        limits = [self._session.steps_until_exchange(done), *(hook.steps_until_due(cursor) for hook in self._hooks)]
        count = min(last - cursor.step, *(limit for limit in limits if limit is not None), last - cursor.step)
        logs, left = None, count
        while left:
            block, first, taken = self._feed.take(left)
            logs, good = self._steps(block, tf.constant(first), tf.constant(taken))
            if int(good) < taken:
                raise self._diverged(Cursor(cursor.epoch, cursor.step + count - left + int(good)), logs)
            left -= taken
        cursor = Cursor(cursor.epoch, cursor.step + count)
        self._session.after_steps(done + count)
        if cursor.step == self._plan.steps_per_epoch:
            self._session.finish_epoch(done + count)
        self._cursor = cursor
        seconds = time.perf_counter() - began
        for hook in self._hooks:
            hook.on_steps(cursor, count, seconds)
        return logs

    def _diverged(self, cursor: Cursor, logs: Any) -> Diverged:
        """The loss is no number from the step at `cursor` on."""
        step = cursor.epoch * self._plan.steps_per_epoch + cursor.step
        batch = "" if self._describe is None else f", whose batch on this rank has {self._describe(cursor)}"
        return Diverged(
            f"training diverged: the loss is {float(logs['loss'])} from step {step} on "
            f"(step {cursor.step} of epoch {cursor.epoch + 1}){batch}.",
            step=step,
        )


def steps_function(
    model: keras.Model, session: SyncSession, block_spec: Any, class_weight: Mapping[int, float] | None
) -> Callable[[Any, Any, Any], Any]:
    """(block, first, n) -> logs of the last of n steps of a block, and how many steps passed before the loss was no
    number; traced once for every n and batch size.
    """

    # Plain Python at tracing: AutoGraph would warn of a hook that has no statement.
    begin_step = tf.autograph.experimental.do_not_convert(session.begin_step)
    end_step = tf.autograph.experimental.do_not_convert(session.end_step)

    def train_step(data: Any) -> Any:
        begin_step()
        logs = model.train_step(data if class_weight is None else weigh_classes(data, class_weight))
        end_step()
        return logs

    if model.run_eagerly:

        def eager(block: Any, first: Any, count: Any) -> Any:
            good, finite = 0, True
            for index in range(int(first), int(first) + int(count)):
                logs = train_step(step_of(block, index))
                finite = finite and bool(_finite(logs))
                good += finite
            return logs, good

        return eager
    compiled = bool(model.jit_compile) and not session.in_graph
    one_step = tf.function(train_step, jit_compile=compiled, reduce_retracing=True)
    number = tf.TensorSpec((), tf.int32)

    @tf.function(input_signature=[block_spec, number, number])
    def several(block: Any, first: Any, count: Any) -> Any:
        logs = one_step(step_of(block, first))
        finite = _finite(logs)
        good = tf.cast(finite, tf.float32)  # of a type that a GPU adds up by itself
        for index in tf.range(first + 1, first + count):
            logs = one_step(step_of(block, index))
            finite = tf.logical_and(finite, _finite(logs))
            good += tf.cast(finite, tf.float32)
        return logs, good

    run: Callable[[Any, Any, Any], Any] = several
    return run


def _finite(logs: Any) -> Any:
    """Whether the loss among a step's logs is a number; True where a custom ``train_step`` has none."""
    loss = logs.get("loss") if isinstance(logs, Mapping) else None
    if loss is None:
        return tf.constant(True)
    finite = tf.math.is_finite(tf.cast(loss, tf.float32))
    return finite if finite.shape.rank == 0 else tf.reduce_all(finite)


class _StrategyMetrics(keras.callbacks.Callback):
    """Comes before the user's callbacks, so that they see the strategy's metrics among the epoch's logs."""

    def __init__(self, session: SyncSession) -> None:
        super().__init__()
        self._session = session

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._session.metrics())


class _AfterCallbacks(keras.callbacks.Callback):
    """Comes after the user's callbacks, so that what those changed or decided is known."""

    def __init__(self, loop: _StepLoop, hooks: Iterable[StepHook]) -> None:
        super().__init__()
        self._loop, self._hooks = loop, list(hooks)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.model.stop_training:
            self._loop.leave_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for hook in self._hooks:
            hook.on_epoch_end(epoch, dict(logs or {}))
