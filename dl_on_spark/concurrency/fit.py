"""Parameters of the theory from measured points: a link from exchanges, a step's two parts from batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dl_on_spark.concurrency.communication import EXCHANGES, Link

_UNIT = Link(1.0, 0.0)
_ROUNDS = 60


def fit_link(points: Sequence[tuple[int, float]], world: int, algorithms: Sequence[str]) -> Link:
    """The link under which ``algorithms[i]`` between ``world`` ranks takes the measured ``points[i]``.

    ``points``: (bytes, seconds). The reduction's own time is part of the seconds per byte. Relative errors count, so
    that small messages, whose seconds are few, weigh as much as large ones.
    """
    latencies, moved = [], []
    for (size, _), name in zip(points, algorithms, strict=True):
        cost = EXCHANGES[name](size, world, _UNIT)
        latencies.append(cost.seconds)
        moved.append(cost.bytes)
    alpha, beta = two_parts(latencies, moved, [seconds for _, seconds in points])
    return Link(alpha, beta)


def two_parts(first: Sequence[float], second: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The (a, b) of at least 0 that make ``a first + b second`` closest to ``seconds``, by least relative errors.

    Errors are taken absolutely, not squared (by reweighting): one disturbed point moves the others little.
    """
    target = np.asarray(seconds, float)
    columns = np.stack([np.asarray(first, float), np.asarray(second, float)], axis=1) / target[:, None]
    weights = np.ones(len(target))
    best = np.zeros(2)
    for _ in range(_ROUNDS):
        best = _two_non_negative(columns * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ best - 1), 1e-3))
    return float(best[0]), float(best[1])


def _two_non_negative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Least squares of two unknowns, none below 0: the best of the free solution and those with one left out."""
    free, *_ = np.linalg.lstsq(columns, target, rcond=None)
    if free.min() >= 0:
        return np.asarray(free)
    candidates = [np.zeros(2)]
    for kept in (0, 1):
        column = columns[:, kept]
        alone = np.zeros(2)
        alone[kept] = max(0.0, float(column @ target) / max(float(column @ column), 1e-300))
        candidates.append(alone)
    return min(candidates, key=lambda one: float(((columns @ one - target) ** 2).sum()))
