"""How many steps a round of local SGD has, where that changes while the model trains.

Early steps change most, so they gain most from averaging; later rounds may be longer.

- `Stepped`: by the steps done, as learning rates are often stepped;
- `Quadratic`: by the learning rate, ``max(base, floor((alpha / lr)^2))``, the quadratic synchronization rule (Gu,
  Lyu, Arora, Huang 2024).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Self

from dl_on_spark.errors import ConfigError

_LONGEST = 2**31
_ROUNDING = 1e-6
"""Keras holds the learning rate in float32: a square meant as 4 must not become 3."""


@dataclass(frozen=True)
class Stepped:
    """``pieces``: (step, every), rising by step from step 0 on: from that step on, rounds have ``every`` steps."""

    pieces: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        pieces = tuple((step, every) for step, every in self.pieces)
        object.__setattr__(self, "pieces", pieces)
        rising = all(one[0] < other[0] for one, other in itertools.pairwise(pieces))
        whole = all(isinstance(number, int) for piece in pieces for number in piece)
        if not pieces or pieces[0][0] != 0 or not rising or not whole or min(every for _, every in pieces) < 1:
            raise ConfigError(
                f"local_sgd: every={self}.",
                fix="Give step:every in rising order, the first step 0, every from 1 on: stepped(0:4,1000:16).",
            )

    def __str__(self) -> str:
        return f"stepped({','.join(f'{step}:{every}' for step, every in self.pieces)})"

    @classmethod
    def parse(cls, arguments: str) -> Self:
        """From ``0:4,1000:16``. Raises ValueError where that is no list of pairs of whole numbers."""
        pairs = [piece.split(":") for piece in arguments.split(",")]
        return cls(tuple((int(step), int(every)) for step, every in pairs))

    def every(self, step: int, learning_rate: float) -> int:
        """Steps of the round that begins after ``step`` steps."""
        return next(every for start, every in reversed(self.pieces) if start <= step)


@dataclass(frozen=True)
class Quadratic:
    """At least ``base`` steps, more as the learning rate falls below ``alpha / sqrt(base)``."""

    base: int = 4
    alpha: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.base, int) or self.base < 1 or not 0 < self.alpha < math.inf:
            raise ConfigError(
                f"local_sgd: every={self}.", fix="Use a base from 1 on and an alpha above 0: quadratic(4,0.02)."
            )

    def __str__(self) -> str:
        return f"quadratic({self.base},{self.alpha})"

    @classmethod
    def parse(cls, arguments: str) -> Self:
        """From ``4,0.02``. Raises ValueError or TypeError where that is no whole number and a number."""
        base, *alpha = arguments.split(",")
        return cls(int(base), *(float(number) for number in alpha))

    def every(self, step: int, learning_rate: float) -> int:
        """Steps of a round with this learning rate."""
        if not learning_rate > 0:
            return self.base
        square = min((self.alpha / learning_rate) ** 2, _LONGEST)
        return max(self.base, math.floor(square * (1 + _ROUNDING)))


SCHEDULES: dict[str, type[Stepped] | type[Quadratic]] = {"stepped": Stepped, "quadratic": Quadratic}
