"""What is measured of a model: pure functions of labels and scores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import InputError

Array = npt.NDArray[Any]

CALIBRATION_BINS = 10
_EPSILON = 1e-7  # Keras's own bound for probabilities


@dataclass(frozen=True)
class CalibrationBin:
    """Rows whose score lies in one tenth of [0, 1]: how many, their mean score and the share of ones."""

    rows: int
    mean_score: float
    observed_rate: float


@dataclass(frozen=True)
class Metrics:
    """A binary classifier (or a regressor: then only the errors) on the rows of one snapshot.

    ``snapshot``: fingerprint of the rows; ``model``: SHA-256 of model.keras. The baseline predicts one
    constant: the mean label of the training rows. Of a classifier ``mean_squared_error`` is the Brier
    score. ``auc_error``: how far the exact AUC may be from ``auc``; 0 except on very large tables.
    ``calibration_error``: expected calibration error, how far score and observed rate are apart on average.
    """

    rows: int
    snapshot: str
    base_rate: float
    baseline_rate: float
    mean_squared_error: float
    mean_absolute_error: float
    auc: float | None = None
    auc_error: float = 0.0
    log_loss: float | None = None
    accuracy: float | None = None
    baseline_log_loss: float | None = None
    calibration: tuple[CalibrationBin, ...] = ()
    calibration_error: float | None = None
    model: str = ""

    def to_json(self) -> str:
        """All of the metrics as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Metrics:
        """The metrics that `to_json` wrote. Raises `InputError` for any other text."""
        with refused_as_damaged():
            return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Metrics:
        """The metrics that `dataclasses.asdict` made into a mapping."""
        return cls(**{**data, "calibration": tuple(CalibrationBin(**b) for b in data["calibration"])})


@contextlib.contextmanager
def refused_as_damaged() -> Iterator[None]:
    """Raise `InputError` where what was read is not what was written."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"metrics.json is damaged ({error}).", fix="Run the evaluate job again.") from error


def metrics_of(truth: Array, scores: Array, baseline_rate: float, fingerprint: str = "") -> Metrics:
    """Metrics of `scores` (float, shape (rows,)) against `truth`; binary ones where all labels are 0 or 1."""
    truth, scores = np.asarray(truth, np.float64), np.asarray(scores, np.float64)
    found = Metrics(
        rows=int(truth.size),
        snapshot=fingerprint,
        base_rate=float(truth.mean()),
        baseline_rate=float(baseline_rate),
        mean_squared_error=float(np.square(scores - truth).mean()),
        mean_absolute_error=float(np.abs(scores - truth).mean()),
    )
    if not is_binary(truth, scores):
        return found
    bins = calibration(truth, scores)
    return replace(
        found,
        auc=area_under_curve(truth, scores),
        log_loss=log_loss(truth, scores),
        accuracy=float(((scores >= 0.5) == (truth == 1)).mean()),
        baseline_log_loss=constant_log_loss(found.base_rate, baseline_rate),
        calibration=bins,
        calibration_error=calibration_error(bins),
    )


def is_binary(truth: Array, scores: Array) -> bool:
    """Whether labels are 0 or 1 and scores may be probabilities; so is an empty part of a table."""
    return bool(np.isin(truth, (0.0, 1.0)).all() and ((scores >= 0) & (scores <= 1)).all())


def area_under_curve(truth: Array, scores: Array) -> float | None:
    """Share of (one, zero) pairs that the scores order right, ties half (Mann and Whitney 1947).

    None when only one class is there.
    """
    ones = int(truth.sum())
    zeros = truth.size - ones
    if ones == 0 or zeros == 0:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[place]  # ties share their mean rank
    return float((ranks[truth == 1].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def cross_entropy(truth: Array, scores: Array) -> Array:
    """Cross entropy of each row in nats, probabilities kept off 0 and 1 as Keras does."""
    p = np.clip(scores, _EPSILON, 1 - _EPSILON)
    found: Array = -(truth * np.log(p) + (1 - truth) * np.log1p(-p))
    return found


def log_loss(truth: Array, scores: Array) -> float:
    """Mean cross entropy over the rows."""
    return float(cross_entropy(truth, scores).mean())


def constant_log_loss(base_rate: float, rate: float) -> float:
    """Mean cross entropy when every row is given the probability `rate` and `base_rate` of them are ones."""
    zero, one = cross_entropy(np.array([0.0, 1.0]), np.array([rate, rate]))
    return float((1 - base_rate) * zero + base_rate * one)


def tenth(scores: Array) -> Array:
    """The calibration bin of each score, 0 to 9."""
    return np.minimum((scores * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)


def calibration(truth: Array, scores: Array) -> tuple[CalibrationBin, ...]:
    """Observed rate against mean score in ten bins of equal width; empty bins are left out."""
    bins = tenth(scores)
    found = []
    for number in range(CALIBRATION_BINS):
        inside = bins == number
        if inside.any():
            found.append(CalibrationBin(int(inside.sum()), float(scores[inside].mean()), float(truth[inside].mean())))
    return tuple(found)


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """Expected calibration error (Guo et al. 2017, eq. 5): mean distance of score and rate, weighted by rows."""
    rows = sum(one.rows for one in bins)
    return sum(one.rows * abs(one.mean_score - one.observed_rate) for one in bins) / rows
