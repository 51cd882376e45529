"""Learning rates for large batches: scaled by the global batch, with a gradual warm-up.

A model builder with a parameter ``global_batch_size`` or ``steps_per_epoch`` gets these numbers of the run.
"""

from __future__ import annotations

from typing import Any, Literal

import keras

from dl_on_spark.errors import ConfigError

Rate = Any
"""A number, or a `keras.optimizers.schedules.LearningRateSchedule`."""

_RULES = {"linear": 1.0, "square_root": 0.5}


def large_batch_rate(
    rate: Rate,
    *,
    base_batch: int,
    batch: int,
    warm_up_steps: int = 0,
    rule: Literal["linear", "square_root"] = "linear",
) -> WarmUp:
    """The learning rate for ``batch`` rows an update, where ``rate`` is good for ``base_batch``.

    ``rule``: "linear" multiplies by ``batch / base_batch`` (Goyal et al. 2017, "Accurate, Large Minibatch SGD", for
    SGD with momentum); "square_root" by its square root (Krizhevsky 2014; for Adam and its kin, Malladi et al. 2022).
    The rate rises from ``rate`` to the scaled one in ``warm_up_steps`` steps, in a line (Goyal's gradual warm-up:
    five epochs). ``rate`` may be a schedule, for instance a decay. Steps count as in Keras: each batch is one, also
    where an optimizer accumulates k of them; then ``batch`` is k global batches.
    """
    if rule not in _RULES:
        raise ConfigError(f"large_batch_rate: rule={rule!r}.", fix=f"Use one of {', '.join(_RULES)}.")
    if min(base_batch, batch) < 1:
        raise ConfigError(
            f"large_batch_rate: base_batch={base_batch}, batch={batch}.", fix="Both count rows of an update, from 1 on."
        )
    return WarmUp(rate, (batch / base_batch) ** _RULES[rule], warm_up_steps)


@keras.saving.register_keras_serializable(package="dl_on_spark")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """``rate`` times a factor that goes from 1 to ``factor`` in ``steps`` steps, in a line.

    A factor below 1 holds from the first step on: a rate above the one asked for is no warm-up.
    """

    def __init__(self, rate: Rate, factor: float, steps: int) -> None:
        super().__init__()
        if not factor > 0 or steps < 0:
            raise ConfigError(
                f"WarmUp: factor={factor}, steps={steps}.", fix="Use a factor above 0 and no less than 0 steps."
            )
        self.rate, self.factor, self.steps = rate, float(factor), int(steps)

    def __call__(self, step: Any) -> Any:
        ops = keras.ops
        rate = self.rate(step) if callable(self.rate) else self.rate
        done = ops.minimum(ops.cast(step, "float32") / max(1, self.steps), 1.0) if self.steps else 1.0
        start = min(1.0, self.factor)
        return rate * (start + (self.factor - start) * done)

    def get_config(self) -> dict[str, Any]:
        """As Keras saves it in a model file."""
        rate = keras.saving.serialize_keras_object(self.rate) if callable(self.rate) else self.rate
        return {"rate": rate, "factor": self.factor, "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """What `get_config` gave."""
        rate = config["rate"]
        return cls(
            **{**config, "rate": keras.saving.deserialize_keras_object(rate) if isinstance(rate, dict) else rate}
        )
