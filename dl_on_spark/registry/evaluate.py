"""How good a model is on held-out rows: pure functions of labels and scores, and the job that feeds them.

Labels and scores (12 bytes a row) come to the driver, so AUC and log loss are exact; beyond 50 million rows
an evenly spaced sample of the row groups is judged, and ``rows`` says how many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import InputError
from dl_on_spark.lake import RowGroups, Snapshot, Table
from dl_on_spark.registry.predictions import SavedModel, map_predictions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Array = npt.NDArray[Any]

_MAX_ROWS = 50_000_000
_BINS = 10
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

    The baseline predicts one constant: the mean label of the training rows.
    """

    rows: int
    snapshot: str
    base_rate: float
    baseline_rate: float
    mean_squared_error: float
    mean_absolute_error: float
    auc: float | None = None
    log_loss: float | None = None
    accuracy: float | None = None
    baseline_log_loss: float | None = None
    calibration: tuple[CalibrationBin, ...] = ()

    def to_json(self) -> str:
        """All of the metrics as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Metrics:
        """The metrics that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "calibration": tuple(CalibrationBin(**b) for b in data["calibration"])})


def evaluate(spark: SparkSession, model: SavedModel, table: Table) -> Metrics:
    """Metrics of `model` on all rows of `table`. Raises `InputError` unless the schema has one label."""
    labels = model.schema.labels
    if len(labels) != 1:
        raise InputError(
            f"{model.schema.source} has {len(labels)} labels; evaluation needs one.", fix="Keep one label."
        )
    label = labels[0].name
    snapshot = _sample(table.snapshot())
    model.schema.check(snapshot.schema, snapshot.uri, [label])

    def result(kept: pa.Table, scores: npt.NDArray[np.float32]) -> Iterator[pa.RecordBatch]:
        known = np.asarray(kept.column(0).cast(pa.float64()), dtype=np.float64)
        yield pa.RecordBatch.from_pydict({"labels": [known.tobytes()], "scores": [scores.tobytes()]})

    frame = map_predictions(spark, model, snapshot, [label], result, "labels binary, scores binary")
    found = frame.collect()
    truth = np.concatenate([np.frombuffer(row.labels, np.float64) for row in found])
    scores = np.concatenate([np.frombuffer(row.scores, np.float32) for row in found])
    if scores.size != truth.size:
        raise InputError(
            f"the model has {scores.size // truth.size} outputs a row; evaluation needs one.", fix="Use one output."
        )
    if np.isnan(truth).any():
        raise InputError(
            f"{snapshot.uri}: label {label!r} has {int(np.isnan(truth).sum())} nulls.",
            fix="Filter them out with where().",
        )
    return metrics_of(truth, scores, model.statistics.label_means[label], snapshot.fingerprint)


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
    if not np.isin(truth, (0.0, 1.0)).all() or scores.min() < 0 or scores.max() > 1:
        return found
    return replace(
        found,
        auc=area_under_curve(truth, scores),
        log_loss=log_loss(truth, scores),
        accuracy=float(((scores >= 0.5) == (truth == 1)).mean()),
        baseline_log_loss=log_loss(truth, np.full_like(truth, baseline_rate)),
        calibration=calibration(truth, scores),
    )


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


def log_loss(truth: Array, scores: Array) -> float:
    """Mean cross entropy in nats, probabilities kept off 0 and 1 as Keras does."""
    p = np.clip(scores, _EPSILON, 1 - _EPSILON)
    return float(-(truth * np.log(p) + (1 - truth) * np.log1p(-p)).mean())


def calibration(truth: Array, scores: Array) -> tuple[CalibrationBin, ...]:
    """Observed rate against mean score in ten bins of equal width; empty bins are left out."""
    bins = np.minimum((scores * _BINS).astype(int), _BINS - 1)
    found = []
    for number in range(_BINS):
        inside = bins == number
        if inside.any():
            found.append(CalibrationBin(int(inside.sum()), float(scores[inside].mean()), float(truth[inside].mean())))
    return tuple(found)


def _sample(snapshot: Snapshot) -> Snapshot:
    if snapshot.rows <= _MAX_ROWS:
        return snapshot
    groups = snapshot.row_groups
    chosen = slice(None, None, -(-snapshot.rows // _MAX_ROWS))
    return replace(
        snapshot,
        row_groups=RowGroups(
            groups.file[chosen],
            groups.index[chosen],
            groups.rows[chosen],
            groups.stored_rows[chosen],
            groups.bytes[chosen],
        ),
    )
