"""Local SGD: workers step alone and average their models every so many steps.

One idea covers a family: after a round, ``d = x - mean_k(x_k)`` is the averaged difference from the round's
start x, weighted by rows, and an outer optimizer applies it.

- none: ``x - d``, model averaging (McDonald et al. 2010; Stich 2018);
- `Momentum`: ``u = m u + d; x = x - lr u``, SlowMo (Wang et al. 2019) and block momentum (BMUF, Chen and
  Huo 2016);
- `Nesterov`: ``v = m v + d; x = x - lr (d + m v)``, DiLoCo (Douillard et al. 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import ConfigError
from dl_on_spark.sync.accumulation import check_rounds
from dl_on_spark.sync.base import Arrays, FlatVariables, StepRows, SyncSession, SyncStrategy, running_statistics
from dl_on_spark.sync.schedule import Quadratic, Stepped

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Flat = npt.NDArray[Any]


@dataclass(frozen=True)
class Momentum:
    """Outer heavy-ball momentum: SlowMo, block momentum."""

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        _check_outer(self)

    def apply(self, difference: Flat, velocity: Flat) -> Flat:
        """What to subtract from the round's start; `velocity` is updated in place."""
        velocity *= self.momentum
        velocity += difference
        return self.lr * velocity

    def __str__(self) -> str:
        return f"momentum({self.lr},{self.momentum})"


@dataclass(frozen=True)
class Nesterov:
    """Outer Nesterov momentum: DiLoCo."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_outer(self)

    def apply(self, difference: Flat, velocity: Flat) -> Flat:
        """What to subtract from the round's start; `velocity` is updated in place."""
        velocity *= self.momentum
        velocity += difference
        return self.lr * (difference + self.momentum * velocity)

    def __str__(self) -> str:
        return f"nesterov({self.lr},{self.momentum})"


@dataclass(frozen=True)
class LocalSGD(SyncStrategy):
    """Average models every ``every`` steps, and always at an epoch's end.

    ``every``: a number, or a schedule that says it at each round's start. ``outer``: the outer optimizer on the
    averaged difference. ``start_at``: average every step until that step, without the outer optimizer (post-local
    SGD, Lin et al. 2020). Optimizer slots stay local to each rank; batch-norm statistics are averaged with the
    weights.
    """

    every: int | Stepped | Quadratic = 16
    outer: Momentum | Nesterov | None = None
    start_at: int = 0

    def __post_init__(self) -> None:
        scheduled = isinstance(self.every, Stepped | Quadratic)
        right = scheduled or (isinstance(self.every, int) and self.every >= 1)
        if not right or not isinstance(self.start_at, int) or self.start_at < 0:
            raise ConfigError(
                f"local_sgd: every={self.every}, start_at={self.start_at}.",
                fix="every counts steps from 1 on, start_at from 0 on.",
            )

    def __str__(self) -> str:
        parts = [f"every={self.every}"]
        if self.outer is not None:
            parts.append(f"outer={self.outer}")
        if self.start_at:
            parts.append(f"start_at={self.start_at}")
        return f"local_sgd:{','.join(parts)}"

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        return LocalSGDSession(self, model, comm, rows)


class LocalSGDSession(SyncSession):
    """Averages between two `tf.function` calls; the step itself is Keras's own."""

    replicas_identical = False

    def __init__(self, config: LocalSGD, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        check_rounds(model, 1 if config.start_at else config.every, "local_sgd")
        self._config, self._comm, self._rows = config, comm, rows
        self._optimizer: Any = model.optimizer
        trainable = list(model.trainable_weights)
        self._variables = FlatVariables([*trainable, *running_statistics(model)])
        self._trained = sum(int(np.prod(v.shape)) for v in trainable)
        self._every = config.every if isinstance(config.every, int) else 1  # steps of this round
        self._exchanged = 0  # steps done at the last exchange
        self._start: Flat | None = None
        self._velocity: Flat | None = None
        if config.outer is not None:
            self._start = self._variables.read()[: self._trained].copy()
            self._velocity = np.zeros_like(self._start)

    def steps_until_exchange(self, step: int) -> int | None:
        if step < self._config.start_at:
            return 1
        return max(1, self._exchanged + self._every - step)

    def before_steps(self, step: int) -> None:
        schedule = self._config.every
        if step == self._exchanged >= self._config.start_at and not isinstance(schedule, int):
            # Not at the exchange: an epoch's callbacks may change the learning rate after it.
            every = np.array([schedule.every(step, float(self._optimizer.learning_rate))])
            self._every = int(self._comm.allreduce(every, "max")[0])

    def after_steps(self, step: int) -> None:
        if step <= self._config.start_at or step - self._exchanged >= self._every:
            self._exchange(step)

    def finish_epoch(self, step: int) -> None:
        if step > self._exchanged:
            self._exchange(step)

    def set_step(self, step: int) -> None:
        self._exchanged = step
        if self._start is not None:
            self._start = self._variables.read()[: self._trained].copy()

    def state(self) -> Arrays:
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load_state(self, state: Arrays) -> None:
        if self._velocity is not None:
            self._velocity = state["velocity"].astype(self._variables.dtype)

    def _exchange(self, step: int) -> None:
        share = self._variables.dtype.type(self._rows.share(self._exchanged, step))
        self._exchanged = step
        if self._comm.world_size == 1 and self._config.outer is None:
            return
        mean = self._variables.read() * share
        self._comm.allreduce(mean)
        if self._config.outer is not None:
            assert self._start is not None
            assert self._velocity is not None
            trained = mean[: self._trained]
            if step > self._config.start_at:
                trained[:] = self._start - self._config.outer.apply(self._start - trained, self._velocity)
            self._start = trained.copy()
        self._variables.write(mean)


def _check_outer(outer: Momentum | Nesterov) -> None:
    if not (0 < outer.lr < math.inf and 0 <= outer.momentum < 1):
        raise ConfigError(
            f"local_sgd: outer optimizer {outer}.", fix="Use a learning rate above 0 and a momentum from 0 to below 1."
        )
