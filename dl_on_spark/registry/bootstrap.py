"""How sure is a difference? Two models' scores of the same rows, drawn anew with replacement (Efron 1979).

Each round draws as many rows as there are and weighs them by how often they were drawn, the same for both models:
what makes a row hard for both cancels out. The rounds are seeded, so a gate that is asked again says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.registry.metrics import cross_entropy

Array = npt.NDArray[Any]

ROUNDS = 1_000
_SEED = 7
_CELLS = 2_000_000  # of (rounds, rows) at a time: some 16 MB for each array


@dataclass(frozen=True)
class Interval:
    """``value`` on the rows as they are; ``low`` and ``high``: percentiles over the rounds."""

    value: float
    low: float
    high: float


def paired_difference(
    metric: str, truth: Array, candidate: Array, current: Array, confidence: float = 0.95, rounds: int = ROUNDS
) -> Interval | None:
    """The candidate's metric less the current model's on rows of shape (rows,), with its interval.

    None where the metric has no value: an AUC of one class. Rounds that drew one class alone are left out.
    """
    weighted = _weighted_difference(metric, np.asarray(truth, np.float64), candidate, current)
    value = float(weighted(np.ones((1, len(truth))))[0])
    if np.isnan(value):
        return None
    found = np.concatenate([weighted(counts) for counts in _draws(len(truth), rounds)])
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(found, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def metric_of(metric: str, truth: Array, scores: Array) -> float | None:
    """The metric itself; None where it has no value."""
    value = float(_weighted(metric, np.asarray(truth, np.float64), scores)(np.ones((1, len(truth))))[0])
    return None if np.isnan(value) else value


def _draws(rows: int, rounds: int) -> Iterator[Array]:
    """How often each row was drawn, (rounds of this part, rows)."""
    generator = np.random.default_rng([_SEED, rows])
    at_once = max(1, _CELLS // max(rows, 1))
    for first in range(0, rounds, at_once):
        part = min(at_once, rounds - first)
        drawn = generator.integers(0, rows, (part, rows)) + np.arange(part)[:, None] * rows
        yield np.bincount(drawn.ravel(), minlength=part * rows).reshape(part, rows).astype(np.float64)


def _weighted_difference(metric: str, truth: Array, candidate: Array, current: Array) -> Callable[[Array], Array]:
    new, old = _weighted(metric, truth, candidate), _weighted(metric, truth, current)
    return lambda counts: new(counts) - old(counts)


def _weighted(metric: str, truth: Array, scores: Array) -> Callable[[Array], Array]:
    """The metric as a function of row weights, (rounds, rows) to (rounds,)."""
    scores = np.asarray(scores, np.float64)
    if metric == "auc":
        return _weighted_auc(truth, scores)
    if metric == "accuracy":
        of_row = ((scores >= 0.5) == (truth == 1)).astype(np.float64)
    elif metric == "log_loss":
        of_row = cross_entropy(truth, scores)
    else:
        of_row = np.square(scores - truth) if metric == "mean_squared_error" else np.abs(scores - truth)
    return lambda counts: counts @ of_row / counts.sum(axis=1)


def _weighted_auc(truth: Array, scores: Array) -> Callable[[Array], Array]:
    """Rows sorted once; each round adds up weights below and beside each one, ties half."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    one = truth[order] == 1

    def area(counts: Array) -> Array:
        weights = counts[:, order]
        ones = np.add.reduceat(weights * one, starts, axis=1)
        zeros = np.add.reduceat(weights * ~one, starts, axis=1)
        below = np.cumsum(zeros, axis=1) - zeros
        pairs = ones.sum(axis=1) * zeros.sum(axis=1)
        right = (ones * (below + zeros / 2)).sum(axis=1)
        found: Array = np.divide(right, pairs, out=np.full(len(counts), np.nan), where=pairs > 0)
        return found

    return area
