"""Gradient accumulation: Keras adds up the gradients of k batches and updates weights after the last of them.

With `Allreduce` each rank adds up its own gradients, weighted by its share of each global batch, and only their
sum is exchanged, once in k batches: it is the sum that one worker would have. At an epoch's end and at a
checkpoint the sums so far are exchanged too, so that all ranks hold what one worker would; rank 0 goes on from
there, the others from zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dl_on_spark.errors import ModelError
from dl_on_spark.sync.base import FlatVariables
from dl_on_spark.sync.schedule import Quadratic, Stepped

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator


class Accumulation:
    """Keras's accumulators on one rank of an `Allreduce`."""

    def __init__(self, optimizer: Any, comm: Communicator) -> None:
        self.optimizer, self.steps = optimizer, int(optimizer.gradient_accumulation_steps)
        self._comm = comm
        self._sums = FlatVariables(list(optimizer._accumulated_gradients))
        self._whole = True  # all ranks hold the sum over ranks, as they do before the first step

    @classmethod
    def of(cls, model: keras.Model, comm: Communicator) -> Accumulation | None:
        """None where the model's optimizer does not accumulate."""
        optimizer = _inner(model.optimizer)
        if not optimizer.gradient_accumulation_steps:
            return None
        for variable in model.trainable_variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ModelError(
                    f"allreduce: {variable.path} takes its gradient as its value (float8), also between updates, "
                    "where ranks have different ones.",
                    fix="Leave gradient_accumulation_steps out, and lower global_batch_size.",
                )
        return cls(optimizer, comm)

    def reduce_before_update(self, reduce: Callable[[list[Any]], list[Any]]) -> None:
        """Let ``reduce`` have the mean of k batches' gradients: after their sum, before clipping and the update."""
        own_clip = self.optimizer._clip_gradients
        object.__setattr__(self.optimizer, "_clip_gradients", lambda grads: own_clip(reduce(list(grads))))

    def close(self) -> None:
        """Leave the optimizer as it was."""
        if "_clip_gradients" in vars(self.optimizer):
            object.__delattr__(self.optimizer, "_clip_gradients")

    def share_out(self) -> bool:
        """Steps come next: rank 0 has the sum so far, the others zero. Whether there was a sum to share out."""
        if not self._whole:
            return False
        self._whole = False
        if self._pending and self._comm.rank:
            self._sums.write(np.zeros_like(self._sums.read()))
        return self._pending

    def gather(self) -> None:
        """All ranks have the sum over ranks."""
        if not self._whole and self._pending:
            self._sums.write(self._comm.allreduce(self._sums.read()))
        self._whole = True

    @property
    def _pending(self) -> bool:
        """Whether gradients wait for an update; alike on all ranks."""
        return int(self.optimizer._iterations.numpy()) % self.steps != 0


def check_rounds(model: keras.Model, every: int | Stepped | Quadratic, strategy: str) -> None:
    """Raise `ModelError` where replicas would be exchanged between the batches of one update."""
    steps = _inner(model.optimizer).gradient_accumulation_steps
    if not steps:
        return
    lengths = [every] if isinstance(every, int) else [n for _, n in every.pieces] if isinstance(every, Stepped) else []
    if not lengths or any(length % steps for length in lengths):
        raise ModelError(
            f"{strategy}: every={every} counts batches, and the optimizer updates weights after each "
            f"gradient_accumulation_steps={steps} of them: models would be exchanged that no update has changed.",
            fix=f"Use a multiple of {steps} for every, or leave gradient_accumulation_steps out.",
        )


def _inner(optimizer: Any) -> Any:
    """The optimizer that accumulates: a loss scaler has it inside."""
    return getattr(optimizer, "inner_optimizer", optimizer)
