"""Metrics of tables too large to collect: sums by label and score bin, which add up over the row groups.

All is exact but the AUC, where two rows in one of the 65,536 bins count as a tie. Each such pair is at
most half a pair off, so the error is at most half the share of pairs that lie in one bin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.registry.metrics import (
    CalibrationBin,
    Metrics,
    calibration_error,
    constant_log_loss,
    cross_entropy,
    is_binary,
    tenth,
)

Array = npt.NDArray[Any]
Tally = Mapping[str, Array]

SCORE_BINS = 65_536
# Rows of a part that is no binary classification: they have a place of their own, and no bins.
_NOT_BINARY = -1

KEYS = ("one", "bin", "tenth")
SUMS = ("rows", "labels", "scores", "losses", "squares", "absolutes")
SPARK_SCHEMA = ", ".join(
    [*(f"{name} int" for name in KEYS), "rows long", *(f"{name} double" for name in SUMS if name != "rows")]
)


def tally(truth: Array, scores: Array) -> Tally:
    """Sums of a part of the rows: one entry for each label, score bin and calibration bin that occurs."""
    truth, scores = np.asarray(truth, np.float64), np.asarray(scores, np.float64)
    binary = is_binary(truth, scores)
    if binary:
        one = truth.astype(np.int64)
        place = np.minimum((scores * SCORE_BINS).astype(np.int64), SCORE_BINS - 1)
        tens = tenth(scores)
    else:
        one = place = tens = np.full(truth.shape, _NOT_BINARY, np.int64)
    columns = {
        "one": one,
        "bin": place,
        "tenth": tens,
        "rows": np.ones(truth.shape, np.int64),
        "labels": truth,
        "scores": scores,
        "losses": cross_entropy(truth, scores) if binary else np.zeros(truth.shape),
        "squares": np.square(scores - truth),
        "absolutes": np.abs(scores - truth),
    }
    return add_up(columns)


def add_up(columns: Tally) -> Tally:
    """One entry for each key, with the sums of its entries."""
    keys, place = np.unique(np.stack([columns[name] for name in KEYS]), axis=1, return_inverse=True)
    place, size = place.reshape(-1), keys.shape[1]
    found: dict[str, Array] = {name: keys[i].astype(np.int32) for i, name in enumerate(KEYS)}
    for name in SUMS:
        found[name] = np.bincount(place, weights=columns[name], minlength=size).astype(columns[name].dtype)
    return found


def metrics_of_tally(found: Tally, baseline_rate: float) -> Metrics:
    """Metrics of all rows from the tallies of all parts, put together in any order."""
    found = add_up(found)
    rows = int(found["rows"].sum())
    base_rate = float(found["labels"].sum() / rows)
    metrics = Metrics(
        rows=rows,
        snapshot="",
        base_rate=base_rate,
        baseline_rate=float(baseline_rate),
        mean_squared_error=float(found["squares"].sum() / rows),
        mean_absolute_error=float(found["absolutes"].sum() / rows),
    )
    if (found["bin"] == _NOT_BINARY).any():
        return metrics
    auc, error = _area_under_curve(found)
    bins = _calibration(found)
    right = (found["bin"] >= SCORE_BINS // 2) == (found["one"] == 1)
    return replace(
        metrics,
        auc=auc,
        auc_error=error,
        log_loss=float(found["losses"].sum() / rows),
        accuracy=float(found["rows"][right].sum() / rows),
        baseline_log_loss=constant_log_loss(base_rate, baseline_rate),
        calibration=bins,
        calibration_error=calibration_error(bins),
    )


def _area_under_curve(found: Tally) -> tuple[float | None, float]:
    """The AUC with rows of one bin as ties, and the bound of its error."""
    ones, zeros = (
        np.bincount(found["bin"][found["one"] == k], weights=found["rows"][found["one"] == k], minlength=SCORE_BINS)
        for k in (1, 0)
    )
    pairs = ones.sum() * zeros.sum()
    if pairs == 0:
        return None, 0.0
    below = np.cumsum(zeros) - zeros
    tied = float((ones * zeros).sum() / 2)
    return float(((ones * below).sum() + tied) / pairs), float(tied / pairs)


def _calibration(found: Tally) -> tuple[CalibrationBin, ...]:
    bins = []
    for number in np.unique(found["tenth"]):
        inside = found["tenth"] == number
        rows = int(found["rows"][inside].sum())
        score, label = (float(found[name][inside].sum() / rows) for name in ("scores", "labels"))
        bins.append(CalibrationBin(rows, score, label))
    return tuple(bins)
