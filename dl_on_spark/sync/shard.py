"""A rank's shard: its block of all weights as one flat variable, and the optimizer's state of that block.

The shard's optimizer is a copy of the model's, built on the flat variable. That is the same arithmetic as on the
model's own variables for optimizers that treat each weight for itself; others are refused by name. Between
rounds, weights and state are put together in the model and its optimizer, the same on all ranks, where callbacks
and checkpoints find them; from there the shards are cut again, on whatever number of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import ModelError
from dl_on_spark.sync.base import FlatVariables

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Flat = npt.NDArray[Any]

ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")
"""Keras's optimizers whose update of a weight needs no other weight."""

_WHOLE = {
    "clipnorm": "clips by the norm of a whole weight",
    "global_clipnorm": "clips by the norm of all gradients",
    "use_ema": "averages weights over steps, which the owner of a shard does not count",
    "gradient_accumulation_steps": "sums gradients over steps, which the owner of a shard does not count",
}


def check_optimizer(model: keras.Model) -> None:
    """Raise `ModelError` where a shard cannot be updated without the others."""
    import keras

    optimizer: Any = model.optimizer
    kind = type(optimizer)
    reasons = []
    if kind.__name__ not in ELEMENTWISE or getattr(keras.optimizers, kind.__name__, None) is not kind:
        reasons.append("is not known to treat each weight for itself")
    reasons += [f"{why} ({name})" for name, why in _WHOLE.items() if getattr(optimizer, name, None)]
    if getattr(optimizer, "_exclude_from_weight_decay", None) or getattr(
        optimizer, "_exclude_from_weight_decay_pattern", None
    ):
        reasons.append("excludes some weights from decay by their names (exclude_from_weight_decay)")
    if any(getattr(v, "constraint", None) is not None for v in model.trainable_weights):
        reasons.append("must keep constraints of whole weights")
    if reasons:
        raise ModelError(
            f"parameter_server: the optimizer {kind.__name__} {' and '.join(reasons)}, but a worker has only a shard.",
            fix=f"Use allreduce, or {', '.join(ELEMENTWISE)} without these options (clipvalue is fine).",
        )


class Shard:
    """Block ``comm.rank`` of as many equal blocks as there are ranks; the last ones may be padded with zeros.

    ``updates_per_step``: how often the shard's optimizer is applied in one step of the model's.
    """

    def __init__(self, model: keras.Model, comm: Communicator, updates_per_step: int) -> None:
        import keras
        import tensorflow as tf

        self._comm, self._updates_per_step = comm, updates_per_step
        self._optimizer: Any = model.optimizer
        self._whole = FlatVariables(list(model.trainable_weights))
        self.dtype = self._whole.dtype
        self.size = self._whole.read().size
        """Weights of the model, all shards together."""
        self.block = -(-self.size // comm.world_size)
        """Weights of one shard."""
        with tf.device("CPU:0"):
            self.weights = keras.Variable(np.zeros(self.block, self.dtype), dtype=self.dtype.name, name="shard")
            config = {**self._optimizer.get_config(), "learning_rate": 1.0}
            self._own: Any = type(self._optimizer).from_config(config)
            self._own.build([self.weights])
        self._slots = {name: FlatVariables(list(getattr(self._optimizer, name))) for name in _lists_of_one(self._own)}
        self._scalars = _scalars(self._own)

    def apply(self, gradient: Any, rate: Any) -> Any:
        """Tensors: the gradient of the shard, shape (block,), and the learning rate; returns the new weights."""
        self._own.learning_rate.assign(rate)
        self._own.apply([gradient], [self.weights])
        return self.weights.value

    def cut(self) -> Flat:
        """Take weights and state from the model and its optimizer; returns all weights, shape (size,)."""
        whole = self._whole.read()
        self.weights.assign(self._part(whole))
        for name, slot in self._slots.items():
            getattr(self._own, name)[0].assign(self._part(slot.read()))
        for name, variable in self._scalars.items():
            variable.assign(getattr(self._optimizer, name))
        self._own.iterations.assign(self._optimizer.iterations * self._updates_per_step)
        return whole

    def join(self) -> None:
        """Put all shards' weights and state into the model and its optimizer: the same bits on all ranks."""
        self._whole.write(self._gathered(self.weights))
        for name, slot in self._slots.items():
            slot.write(self._gathered(getattr(self._own, name)[0]).astype(slot.dtype))
        for name, variable in self._scalars.items():
            getattr(self._optimizer, name).assign(variable)

    def _part(self, whole: Flat) -> Flat:
        start = self._comm.rank * self.block
        part = np.zeros(self.block, self.dtype)
        mine = whole[start : start + self.block]
        part[: mine.size] = mine
        return part

    def _gathered(self, variable: Any) -> Flat:
        every: Flat = self._comm.allgather(np.array(variable))
        return every.reshape(-1)[: self.size]


def _lists_of_one(optimizer: Any) -> list[str]:
    """Names of the slots of an optimizer that was built on one variable."""
    import keras

    known = {"_variables", "_trainable_variables"}
    return [
        name
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], keras.Variable) and name not in known
    ]


def _scalars(optimizer: Any) -> dict[str, Any]:
    """State that belongs to no weight (Nadam's product of momenta), by name."""
    import keras

    known = {"_iterations", "_learning_rate"}
    found = {name: v for name, v in vars(optimizer).items() if isinstance(v, keras.Variable) and name not in known}
    return found
