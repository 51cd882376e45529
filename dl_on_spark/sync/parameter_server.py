"""A parameter server without servers: each worker owns a shard of the weights and of the optimizer's state.

Workers push the gradient of each shard to its owner, who applies it, and pull the weights back (Dean et al. 2012,
Li et al. 2014; sharded over the workers as in BytePS and ZeRO). ``staleness`` says how far they may be apart:

- 0: synchronous. Owners reduce the gradients of a step, apply the sum once, and all gather the weights;
- s: stale-synchronous parallel (Ho et al. 2013). A gradient is applied as it comes; a worker that has done c steps
  waits for its weights until everybody has done c - s;
- None (in text: inf): asynchronous. Nobody waits.

With more than 0, the K gradients of a step are K updates: each is weighted by the rank's rows over the ranks'
mean and applied with the learning rate over K, so plain SGD goes as far in a step as synchronous training would.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import ConfigError, ModelError
from dl_on_spark.sync.base import Arrays, FlatVariables, StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.clocks import Clocks
from dl_on_spark.sync.gradient_session import GradientSession, dense
from dl_on_spark.sync.server import PREFIX, ShardServer
from dl_on_spark.sync.shard import Shard, check_optimizer
from dl_on_spark.sync.staleness import StalenessCounts

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Flat = npt.NDArray[Any]


@dataclass(frozen=True)
class ParameterServer(SyncStrategy):
    """Shards of weights and optimizer at their owners; gradients go there, weights come from there.

    ``staleness``: steps that a worker may be ahead of the slowest; 0 is synchronous training, None no limit.
    ``scale_by_staleness``: a gradient's learning rate is divided by its staleness in steps, where that is above 1
    (Zhang et al. 2015). At an epoch's end and at a checkpoint all gradients are applied and all ranks hold the
    same weights; so **the published model** is that of the owners. The epoch's logs have the run's histogram of
    staleness so far. Optimizers must treat each weight for itself: SGD, Adam and their kind; others are refused.
    """

    staleness: int | None = 0
    scale_by_staleness: bool = False

    def __post_init__(self) -> None:
        if self.staleness == math.inf:
            object.__setattr__(self, "staleness", None)
        whole = isinstance(self.staleness, int) and not isinstance(self.staleness, bool)
        if self.staleness is not None and not (whole and self.staleness >= 0):
            raise ConfigError(
                f"parameter_server: staleness={self.staleness}.", fix="Use a number of steps from 0 on, or inf."
            )
        if not isinstance(self.scale_by_staleness, bool):
            raise ConfigError(
                f"parameter_server: scale_by_staleness={self.scale_by_staleness}.", fix="Use true or false."
            )

    def __str__(self) -> str:
        scale = ",scale_by_staleness=true" if self.scale_by_staleness else ""
        return f"parameter_server:staleness={'inf' if self.staleness is None else self.staleness}{scale}"

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        check_optimizer(model)
        if self.staleness == 0 or comm.world_size == 1:
            return SynchronousSession(model, comm, rows)
        return AsynchronousSession(self, model, comm, rows)


class ParameterServerSession(GradientSession):
    """Stands in place of the optimizer's `apply`. In a round, from the first step to `finish_epoch`, the
    optimizer's state is in the shards; between rounds model and optimizer hold everything, on all ranks."""

    def __init__(self, model: keras.Model, comm: Communicator, rows: StepRows, updates_per_step: int) -> None:
        super().__init__("parameter_server", model, comm, rows)
        self._variables = FlatVariables(list(model.trainable_weights))
        self._counts = StalenessCounts(comm)
        self._in_round = False
        if self.in_graph:
            self._shard = Shard(model, comm, updates_per_step)

    @abstractmethod
    def exchange(self, gradient: Any, rate: Any, *, first: bool) -> Any:
        """Tensors: this rank's flat gradient and the learning rate; returns all weights.

        ``first``: of the step's applications.
        """

    @abstractmethod
    def begin_round(self, weights: Flat) -> None:
        """The shards are cut; ``weights`` are those of all."""

    @abstractmethod
    def finish_round(self) -> None:
        """Return when all gradients of all ranks are applied."""

    def before_steps(self, step: int) -> None:
        if not self._in_round:
            self._in_round = True
            if self.in_graph:
                self.begin_round(self._shard.cut())

    def finish_epoch(self, step: int) -> None:
        if not self._in_round:
            return  # no step since
        self._in_round = False
        if self.in_graph:
            self.finish_round()
            self._shard.join()
        self.statistics.agree(step)
        self._counts.agree(step)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        self._counts.set_step(step)

    def metrics(self) -> dict[str, float]:
        """Of all gradients of the run so far: how many were how stale, in steps; mean and greatest staleness."""
        return self._counts.metrics()

    def state(self) -> Arrays:
        return self._counts.state()

    def load_state(self, state: Arrays) -> None:
        self._counts.load_state(state)

    def apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> None:
        import tensorflow as tf

        if not self.in_graph:  # one worker is its own server; its gradients are dense as those of several are
            self.own_apply(dense(grads), trainable_variables)
            return
        given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
        by_variable = {id(v): grad for v, grad in zip(given, grads, strict=True)}
        if set(by_variable) != {id(v) for v in self._variables.variables}:
            self.failure = ModelError(
                f"parameter_server: the model's train_step applies gradients of {len(by_variable)} weights at once, "
                f"the model has {len(self._variables.variables)} to train.",
                fix="Apply the gradients of all trainable weights in one call, or use allreduce.",
            )
            raise self.failure
        parts = [self._flat(by_variable[id(v)], v) for v in self._variables.variables]
        gradient = tf.concat(parts, 0)
        rate = tf.cast(self.optimizer.learning_rate, tf.float64)
        weights = self.exchange(gradient, rate, first=self.applied == 0)
        weights.set_shape([self._shard.size])
        self._variables.assign(weights)
        self.optimizer.iterations.assign_add(1)

    def _flat(self, grad: Any, variable: Any) -> Any:
        """A gradient as part of the flat one; that of a weight without influence on the loss is 0."""
        import tensorflow as tf

        dtype = self._shard.dtype
        if grad is None:
            return tf.zeros([math.prod(variable.shape)], dtype)
        return tf.cast(tf.reshape(tf.convert_to_tensor(grad), [-1]), dtype)


class SynchronousSession(ParameterServerSession):
    """No server is needed: in every step owners reduce, apply and hand out at the same time.

    The sum of gradients, weighted by rows, is in the order of ranks, so runs repeat bit by bit.
    """

    def __init__(self, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        super().__init__(model, comm, rows, updates_per_step=1)

    def exchange(self, gradient: Any, rate: Any, *, first: bool) -> Any:
        import tensorflow as tf

        shard, dtype = self._shard, gradient.dtype
        own = tf.numpy_function(lambda flat: self._reduce(flat, first), [gradient], dtype)
        own.set_shape([shard.block])
        with tf.device("CPU:0"):
            weights = shard.apply(own, tf.cast(rate, tf.float32))
        return tf.numpy_function(self._gather, [weights], dtype)

    def begin_round(self, weights: Flat) -> None:
        return

    def finish_round(self) -> None:
        return

    def _reduce(self, flat: Flat, first: bool) -> Flat:
        try:
            if first:
                self._share = self.rows.share(self.step, self.step + 1)
                self.step += 1
            padded = np.zeros(self._shard.block * self.comm.world_size, flat.dtype)
            np.multiply(flat, flat.dtype.type(self._share), out=padded[: flat.size])
            return self.comm.reduce_scatter(padded)
        except BaseException as error:
            self.failure = error
            raise

    def _gather(self, weights: Flat) -> Flat:
        try:
            every: Flat = self.comm.allgather(weights)
            return every.reshape(-1)[: self._shard.size]
        except BaseException as error:
            self.failure = error
            raise


class AsynchronousSession(ParameterServerSession):
    """Each rank's server thread applies gradients as they come; the worker pushes and pulls at once."""

    def __init__(self, config: ParameterServer, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        import tensorflow as tf

        super().__init__(model, comm, rows, updates_per_step=comm.world_size)
        self._config = config
        shard, dtype = self._shard, self._shard.dtype
        row = PREFIX + shard.block * dtype.itemsize
        self._requests = comm.requests(row, row)
        self._pushed = 0  # gradients in this round
        self._server: ShardServer | None = None
        self._out = np.zeros((comm.world_size, row), np.uint8)
        self._in = np.zeros((comm.world_size, row), np.uint8)

        def update(gradient: Any, rate: Any) -> Any:
            return shard.apply(gradient, rate)

        # XLA runs in the thread that calls it. Another tf.function would wait for a thread of TensorFlow's pool,
        # which the worker's own exchange may hold while it waits for this one. Called as the concrete function that
        # it is, it takes half the time.
        signature = [tf.TensorSpec([shard.block], dtype), tf.TensorSpec([], tf.float32)]
        with tf.device("CPU:0"):
            self._update = tf.function(update, jit_compile=True, input_signature=signature).get_concrete_function()

    def exchange(self, gradient: Any, rate: Any, *, first: bool) -> Any:
        import tensorflow as tf

        return tf.numpy_function(
            lambda flat, lr: self._push_and_pull(flat, float(lr), first), [gradient, rate], gradient.dtype
        )

    def begin_round(self, weights: Flat) -> None:
        self._pushed = 0
        clocks = Clocks(self.comm.world_size, self._config.staleness)
        self._server = ShardServer(self._requests, clocks, self._apply_push, self._shard.dtype)

    def finish_round(self) -> None:
        assert self._server is not None
        self._server.finish(self._pushed)
        self._server = None

    def close(self) -> None:
        super().close()
        if self._server is not None:
            self._server.stop()
        self._requests.close()

    def _apply_push(self, gradient: Flat, rate: float, staleness: int) -> Flat:
        """In the server's thread: the shard's weights after a worker's gradient."""
        import tensorflow as tf

        rate /= self.comm.world_size
        if self._config.scale_by_staleness:
            rate /= max(1, staleness)
        with tf.device("CPU:0"):
            return np.array(self._update(tf.constant(gradient), tf.constant(rate, tf.float32)))

    def _push_and_pull(self, flat: Flat, rate: float, first: bool) -> Flat:
        server, dtype = self._server, self._shard.dtype
        assert server is not None
        try:
            if first:
                self._weight = dtype.type(self.rows.weight(self.step, self.step + 1))
                self.step += 1
            padded = np.zeros(self._shard.block * self.comm.world_size, dtype)
            np.multiply(flat, self._weight, out=padded[: flat.size])
            self._out[:, :PREFIX] = np.frombuffer(np.float64(rate).tobytes(), np.uint8)
            self._out[:, PREFIX:] = padded.view(np.uint8).reshape(len(self._out), -1)
            self._pushed += 1
            self._requests.ask([row.data for row in self._out], [row.data for row in self._in], server.suspect)
            self._counts.add(int(self._in[:, :PREFIX].copy().view(np.int64).max()))
            weights = self._in[:, PREFIX:].copy().view(dtype)
            return weights.reshape(-1)[: self._shard.size]
        except BaseException as error:
            self.failure = error if server.failure is None else server.failure
            raise self.failure from None
