"""Optimizers for large batches that Keras does not have. LAMB is Keras's own: `keras.optimizers.Lamb`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="dl_on_spark")
class Lars(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks").

    For each layer's weights w with gradient g, learning rate γ, momentum m and weight decay β:

        λ = trust |w| / (|g| + β |w|)
        v = m v + γ λ (g + β w)
        w = w − v

    with norms over the whole array, so every layer moves by about ``trust`` times γ of its own length, however long
    its gradient. Where w or g is zero, λ is 1. Arrays of one dimension (biases, scales and shifts of normalizations)
    take ``v = m v + γ g``, without λ and decay, as in the paper's successors.

    ``learning_rate`` is that of a large batch, several units: see `schedules.large_batch_rate` for its warm-up.
    Clipping, EMA and gradient accumulation are Keras's (``keras_options``).
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        name: str = "lars",
        **keras_options: Any,
    ) -> None:
        # Keras's own weight_decay acts apart from the gradient; this one is part of it.
        super().__init__(learning_rate=learning_rate, name=name, **keras_options)
        if not 0 <= momentum < 1 or weight_decay < 0 or not trust > 0:
            raise ValueError(
                f"Lars: momentum={momentum}, weight_decay={weight_decay}, trust={trust}. "
                "Use a momentum from 0 to below 1, a weight_decay from 0 on and a trust above 0."
            )
        self.momentum, self.trust, self.layer_decay = momentum, trust, weight_decay

    def build(self, variables: list[Any]) -> None:
        """A velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One variable's step, by the formula above."""
        ops = keras.ops
        rate = ops.cast(learning_rate, variable.dtype)
        # Rows of an embedding that occur twice are summed before there is a norm.
        gradient = ops.cast(tf.convert_to_tensor(gradient), variable.dtype)
        if len(variable.shape) > 1:
            long, steep = _norm(variable), _norm(gradient)
            moving = ops.logical_and(long > 0, steep > 0)
            ratio = self.trust * long / ops.where(moving, steep + self.layer_decay * long, 1.0)
            rate = rate * ops.cast(ops.where(moving, ratio, 1.0), variable.dtype)
            gradient = gradient + self.layer_decay * variable
        velocity = self.velocities[self._get_variable_index(variable)]
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    def get_config(self) -> dict[str, Any]:
        """As Keras saves it in a model file."""
        own = {"momentum": self.momentum, "weight_decay": self.layer_decay, "trust": self.trust}
        return {**super().get_config(), **own}


def _norm(values: Any) -> Any:
    """Euclidean, in float32 at least: squares of half precision overflow."""
    ops = keras.ops
    wide = ops.cast(values, "float64" if "float64" in str(values.dtype) else "float32")
    return ops.sqrt(ops.sum(ops.square(wide)))
