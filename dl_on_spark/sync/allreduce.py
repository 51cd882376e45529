"""Synchronous data parallelism: every step's gradient is that of the whole global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import ConfigError, ModelError
from dl_on_spark.sync.base import FlatVariables, StepRows, SyncSession, SyncStrategy, running_statistics

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator


@dataclass(frozen=True)
class Allreduce(SyncStrategy):
    """Reduce gradients over all ranks in every step, weighted by the ranks' rows.

    Each rank's loss is the mean over its own rows, so the gradient of the global batch is
    ``sum_k (n_k / n) g_k``; with it, any number of workers takes the steps of one worker at the same global
    batch. Gradients are packed in buckets of ``bucket_mb`` MiB, last layer first, and reduced in that order.
    Sparse gradients (embeddings) become dense, with one worker too: Keras on TensorFlow squares and clips the
    rows of a category one by one, before they are summed, so Adam's steps would depend on how rows are spread
    over the workers. ``compress`` takes None alone.
    """

    bucket_mb: float = 25.0
    compress: str | None = None

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ConfigError(f"allreduce: bucket_mb={self.bucket_mb}.", fix="Use a number above 0.")
        if self.compress is not None:
            raise ConfigError(
                f"allreduce: this version has no compress={self.compress!r}.",
                fix="Leave compress out; LocalSGD(every=16) sends less.",
            )

    def __str__(self) -> str:
        return "allreduce" if self.bucket_mb == 25.0 else f"allreduce:bucket_mb={self.bucket_mb}"

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        return AllreduceSession(self, model, comm, rows)


class AllreduceSession(SyncSession):
    """Stands between Keras's gradients and the optimizer's `apply`."""

    replicas_identical = True

    def __init__(self, config: Allreduce, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        self._bucket_bytes = int(config.bucket_mb * 2**20)
        self._model, self._comm, self._rows = model, comm, rows
        self._statistics = FlatVariables(running_statistics(model))
        self._step = self._agreed = 0
        self._reductions = 0  # of the step that is being traced
        self._optimizer: Any = model.optimizer
        self.in_graph = comm.world_size > 1
        own_apply = self._optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            dense = _dense(grads)
            return own_apply(self._reduce(dense) if self.in_graph else dense, trainable_variables)

        # On the instance and past Keras's attribute tracking: saving and configuration stay as they are.
        object.__setattr__(self._optimizer, "apply", apply)

    def begin_step(self) -> None:
        self._reductions = 0

    def end_step(self) -> None:
        if self.in_graph and self._model.trainable_weights and not self._reductions:
            self.failure = ModelError(
                "allreduce: this model's train_step trains past model.optimizer, so workers would drift apart.",
                fix="Apply the gradients with model.optimizer.apply, or use LocalSGD.",
            )
            raise self.failure

    def steps_until_exchange(self, step: int) -> int | None:
        return None

    def after_steps(self, step: int) -> None:
        return

    def finish_epoch(self, step: int) -> None:
        """Batch-norm statistics become the mean over all rows since they last agreed."""
        if self.in_graph and self._statistics.variables and step > self._agreed:
            mean = self._statistics.read() * self._statistics.dtype.type(self._rows.share(self._agreed, step))
            self._comm.allreduce(mean)
            self._statistics.write(mean)
        self._agreed = step

    def set_step(self, step: int) -> None:
        self._step = self._agreed = step

    def close(self) -> None:
        if "apply" in vars(self._optimizer):
            object.__delattr__(self._optimizer, "apply")

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
            # A train_step may apply more than once; all of that is one step of the plan.
            exchange = self._first_bucket if number == self._reductions == 0 else self._other_bucket
            with tf.control_dependencies(before):  # the same order on all ranks
                total = tf.numpy_function(exchange, [flat], wide)
            total.set_shape([sum(sizes)])
            before = [total]
            for i, (_, own), part in zip(chosen, bucket, tf.split(total, sizes), strict=True):
                reduced[i] = tf.cast(tf.reshape(part, own.shape), own.dtype)
        self._reductions += bool(present)
        return reduced

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

    def _first_bucket(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._share = self._rows.share(self._step, self._step + 1)
        self._step += 1
        return self._other_bucket(flat)

    def _other_bucket(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        try:
            total: npt.NDArray[Any] = np.multiply(flat, flat.dtype.type(self._share))
            self._comm.allreduce(total)
            return total
        except BaseException as error:
            self.failure = error
            raise


def _dense(grads: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    return [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
