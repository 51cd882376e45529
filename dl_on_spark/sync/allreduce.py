"""Synchronous data parallelism: every step's gradient is that of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.collectives.codecs import Codec, Compressor, parse_codec
from dl_on_spark.errors import ConfigError
from dl_on_spark.sync.accumulation import Accumulation
from dl_on_spark.sync.base import Arrays, StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.compression import BucketCompressors
from dl_on_spark.sync.gradient_session import GradientSession, dense
from dl_on_spark.sync.layerwise import check_whole_layers
from dl_on_spark.sync.noise_scale import NoiseMeter

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Flat = npt.NDArray[Any]


@dataclass(frozen=True)
class Allreduce(SyncStrategy):
    """Reduce gradients over all ranks in every step, weighted by the ranks' rows.

    Each rank's loss is the mean over its own rows, so the gradient of the global batch is
    ``sum_k (n_k / n) g_k``; with it, any number of workers takes the steps of one worker at the same global
    batch. Gradients are packed in buckets of ``bucket_mb`` MiB, last layer first, and reduced in that order.
    Sparse gradients (embeddings) become dense, with one worker too: Keras on TensorFlow squares and clips the
    rows of a category one by one, before they are summed, so Adam's steps would depend on how rows are spread
    over the workers. An optimizer that accumulates k batches exchanges once in k.

    ``compress``: a codec or its text ("fp16", TopK(0.01)) that sums each bucket in fewer bytes. ``noise_scale``:
    measure the gradient noise scale, in rows, as a metric of each epoch; it takes two workers.
    """

    bucket_mb: float = 25.0
    compress: Codec | str | None = None
    noise_scale: bool = False

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ConfigError(f"allreduce: bucket_mb={self.bucket_mb}.", fix="Use a number above 0.")
        if self.compress is not None:
            object.__setattr__(self, "compress", parse_codec(self.compress))
        if not isinstance(self.noise_scale, bool):
            raise ConfigError(f"allreduce: noise_scale={self.noise_scale}.", fix="Use true or false.")
        if self.noise_scale and self.compress is not None:
            raise ConfigError(
                f"allreduce: noise_scale with compress={self.compress}: what compressed gradients sum to is not their "
                "mean.",
                fix="Measure the noise scale in a run without compress.",
            )

    def check(self, world_size: int) -> None:
        if self.noise_scale and world_size < 2:
            raise ConfigError(
                "allreduce: noise_scale compares the gradients of workers; there is one.",
                fix="Use num_workers=2 or more.",
            )

    def __str__(self) -> str:
        options = [] if self.bucket_mb == 25.0 else [f"bucket_mb={self.bucket_mb}"]
        options += [] if self.compress is None else [f"compress={self.compress}"]
        options += ["noise_scale=true"] if self.noise_scale else []
        return ":".join(["allreduce", ",".join(options)] if options else ["allreduce"])

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        return AllreduceSession(self, model, comm, rows)


class AllreduceSession(GradientSession):
    """Reduces gradients on their way to the optimizer."""

    def __init__(self, config: Allreduce, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        super().__init__("allreduce", model, comm, rows)
        self._bucket_bytes = int(config.bucket_mb * 2**20)
        self._reductions = 0  # of the step that is being traced
        self._share = 1.0
        self._exchanged: list[int] | None = []  # steps of the plan in the gradient to be exchanged; None: not known
        self._compressors: BucketCompressors | None = None
        if isinstance(config.compress, Codec):
            config.compress.check_optimizer(self.optimizer)
            check_whole_layers(self.optimizer, config.compress)
            self.in_graph = self.in_graph or config.compress.acts_alone
        if isinstance(config.compress, Codec) and self.in_graph:
            self._compressors = BucketCompressors(config.compress, comm, rows.plan.seed or 0)
        self._noise = NoiseMeter(rows.plan, comm) if config.noise_scale and comm.world_size > 1 else None
        self._accumulation = Accumulation.of(model, comm) if self.in_graph else None
        if self._accumulation is not None:
            self._accumulation.reduce_before_update(self._reduce)

    def apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> Any:
        ready = dense(grads)
        if self.in_graph:
            ready = self._reduce(ready) if self._accumulation is None else self._weighted(ready)
        return self.own_apply(ready, trainable_variables)

    def begin_step(self) -> None:
        super().begin_step()
        self._reductions = 0

    def before_steps(self, step: int) -> None:
        if self._noise is not None and step % self.rows.plan.steps_per_epoch == 0:
            self._noise.begin_epoch()
        if self._accumulation is not None and self._accumulation.share_out():
            self._exchanged = None

    def finish_epoch(self, step: int) -> None:
        """Batch-norm statistics become the mean over all rows since they last agreed."""
        self.statistics.agree(step)
        if self._accumulation is not None:
            self._accumulation.gather()
        if self._noise is not None:
            self._noise.agree()

    def metrics(self) -> dict[str, float]:
        """``noise_scale`` where it was asked for."""
        return {} if self._noise is None else self._noise.metrics()

    def state(self) -> Arrays:
        if self._noise is not None:
            return {"noise_scale": self._noise.sums}
        return {} if self._compressors is None else self._compressors.state()

    def load_state(self, state: Arrays) -> None:
        if self._noise is not None:
            self._noise.sums = state["noise_scale"]
        if self._compressors is not None:
            self._compressors.load_state(state)

    def close(self) -> None:
        if self._accumulation is not None:
            self._accumulation.close()
        super().close()

    def _reduce(self, grads: list[Any]) -> list[Any]:
        """Gradients of the global batch for those of this rank; None stays None."""
        import tensorflow as tf

        present = [i for i, grad in enumerate(grads) if grad is not None]
        reduced = list(grads)
        before: list[Any] = []
        for number, bucket in enumerate(self._buckets([grads[i] for i in present])):
            chosen = [present[position] for position, _ in bucket]
            wide = tf.float64 if any(t.dtype == tf.float64 for _, t in bucket) else tf.float32
            sizes = [t.shape.num_elements() for _, t in bucket]
            flat = tf.concat([tf.reshape(tf.cast(t, wide), [-1]) for _, t in bucket], 0)
            exchange, scale = self._exchange_of(number, [t for _, t in bucket], wide)
            with tf.control_dependencies(before):  # the same order on all ranks
                total = tf.numpy_function(exchange, [flat if scale is None else flat / scale], wide)
            total.set_shape([sum(sizes)])
            before = [total]
            total = total if scale is None else total * scale
            for i, (_, own), part in zip(chosen, bucket, tf.split(total, sizes), strict=True):
                reduced[i] = tf.cast(tf.reshape(part, own.shape), own.dtype)
        self._reductions += bool(present)
        return reduced

    def _weighted(self, grads: list[Any]) -> list[Any]:
        """This rank's gradients times its share of the batch: the optimizer adds them up, `_reduce` gets their sum."""
        import tensorflow as tf

        finite, scaled, first = tf.constant(True), hasattr(self.optimizer, "dynamic_scale"), self.applied == 0
        if scaled:
            each = [tf.reduce_all(tf.math.is_finite(grad)) for grad in grads if grad is not None]
            finite = tf.reduce_all(each)
        assert self._accumulation is not None
        done = self._accumulation.optimizer._iterations.value
        share = tf.numpy_function(
            lambda done, finite: self._part(done, finite, scaled, first), [done, finite], tf.float32
        )
        share.set_shape(())
        return [None if grad is None else grad * tf.cast(share, grad.dtype) for grad in grads]

    def _part(self, done: Any, finite: Any, scaled: bool, first: bool) -> np.float32:
        """This rank's share of the batch; not finite where a loss scaler must skip the batch, on all ranks."""
        assert self._accumulation is not None
        try:
            steps = self._exchanged if done % self._accumulation.steps else []
            if first:
                self._begin_batch()
            if scaled and self.comm.allreduce(np.array([not finite], np.float32))[0]:
                self._exchanged = steps
                return np.float32(np.inf)
            self._exchanged = None if steps is None else [*steps, self.step - 1]
            return np.float32(self._share)
        except BaseException as error:
            self.failure = error
            raise

    def _exchange_of(self, number: int, tensors: list[Any], wide: Any) -> tuple[Callable[[Flat], Flat], Any]:
        """What exchanges bucket ``number``, and the loss scale to take out before and put back after, or None."""
        compressor, scale = None, None
        if self._compressors is not None:
            shapes = [tuple(t.shape.as_list()) for t in tensors]
            compressor = self._compressors.at(self._reductions, number, shapes, np.dtype(wide.as_numpy_dtype))
        if self._accumulation is None and (self._compressors is not None or self._noise is not None):
            # Residuals and an epoch's sums outlive the loss scale, which is a power of two as a rule.
            scale = getattr(self.optimizer, "dynamic_scale", None)
        # A train_step may apply more than once; all of that is one step of the plan.
        first = number == self._reductions == 0
        return (lambda flat: self._exchange(flat, first, compressor)), scale

    def _buckets(self, tensors: Sequence[Any]) -> list[list[tuple[int, Any]]]:
        """(position, tensor) by bucket; the last layers' gradients are ready first."""
        buckets: list[list[tuple[int, Any]]] = [[]]
        size = 0
        for position in reversed(range(len(tensors))):
            tensor = tensors[position]
            bytes_ = tensor.shape.num_elements() * 4
            if buckets[-1] and size + bytes_ > self._bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append((position, tensor))
            size += bytes_
        return buckets if buckets[0] else []

    def _exchange(self, flat: Flat, first: bool, compressor: Compressor | None) -> Flat:
        try:
            if first and self._accumulation is None:
                self._begin_batch()
                self._exchanged = [self.step - 1]
            total: Flat = np.multiply(flat, flat.dtype.type(1 if self._accumulation else self._share))
            if compressor is not None:
                return compressor.reduce(total, self.comm)
            own_square = 0.0 if self._noise is None else float(np.dot(total, total))
            self.comm.allreduce(total)
            if self._noise is not None and self._exchanged:
                self._noise.add(own_square, float(np.dot(total, total)), self._exchanged)
            return total
        except BaseException as error:
            self.failure = error
            raise

    def _begin_batch(self) -> None:
        """The next step of the plan: its rows give the share of this rank."""
        self._share = self.rows.share(self.step, self.step + 1)
        self.step += 1
