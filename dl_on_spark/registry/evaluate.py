"""How good a saved model is on the rows of a table, judged on Spark.

Up to 20 million rows labels and scores come to the driver (12 bytes a row) and every metric is exact.
Beyond that Spark adds up the tallies of `registry.tally`: at most about 131,000 small rows come to the
driver whatever the table's size, and all but the AUC stays exact; its error bound is in the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import InputError, ModelError
from dl_on_spark.lake import Snapshot, Table
from dl_on_spark.registry.metrics import Metrics, metrics_of
from dl_on_spark.registry.predictions import SavedModel, map_predictions
from dl_on_spark.registry.tally import KEYS, SPARK_SCHEMA, SUMS, metrics_of_tally, tally

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Array = npt.NDArray[Any]

EXACT_ROWS = 20_000_000


def evaluate(spark: SparkSession, model: SavedModel, table: Table, *, exact_rows: int = EXACT_ROWS) -> Metrics:
    """Metrics of `model` on all rows of `table`.

    Raises `InputError` unless the schema has one numeric label without nulls in these rows, and
    `ModelError` when the model has several outputs or gives scores that are not finite.
    """
    label = _label(model)
    snapshot = table.snapshot(spark)
    model.schema.check(snapshot.schema, snapshot.uri, [label])
    judge = _exact if snapshot.rows <= exact_rows else _tallied
    found = judge(spark, model, snapshot, label)
    return replace(found, snapshot=snapshot.fingerprint, model=model.digest)


def _label(model: SavedModel) -> str:
    labels = model.schema.labels
    if len(labels) != 1:
        raise InputError(
            f"{model.schema.source} has {len(labels)} labels; evaluation needs one.", fix="Keep one label."
        )
    name = labels[0].name
    if name not in model.statistics.label_means:
        raise InputError(f"label {name!r} is not one number a row.", fix="Evaluation needs a numeric label.")
    return name


def _exact(spark: SparkSession, model: SavedModel, snapshot: Snapshot, label: str) -> Metrics:
    def result(kept: pa.Table, scores: Array) -> Iterator[pa.RecordBatch]:
        columns = {
            "labels": [_labels(kept).tobytes()],
            "scores": [scores.tobytes()],
            "outputs": pa.array([_outputs(scores)], pa.int32()),
        }
        yield pa.RecordBatch.from_pydict(columns)

    schema = "labels binary, scores binary, outputs int"
    found = map_predictions(spark, model, snapshot, [label], result, schema).collect()
    _refuse_several_outputs(max(row.outputs for row in found))
    truth = np.concatenate([np.frombuffer(row.labels, np.float64) for row in found])
    scores = np.concatenate([np.frombuffer(row.scores, np.float32) for row in found])
    _refuse_unknown(snapshot, label, bool(np.isnan(truth).any()), not np.isfinite(scores).all())
    return metrics_of(truth, scores, model.statistics.label_means[label])


def _tallied(spark: SparkSession, model: SavedModel, snapshot: Snapshot, label: str) -> Metrics:
    from pyspark.sql import functions as F

    def result(kept: pa.Table, scores: Array) -> Iterator[pa.RecordBatch]:
        outputs = _outputs(scores)
        counted = tally(_labels(kept), scores if outputs == 1 else np.zeros(kept.num_rows))
        columns = {name: pa.array(counted[name]) for name in (*KEYS, *SUMS)}
        columns["outputs"] = pa.array(np.full(len(counted["rows"]), outputs, np.int32))
        yield pa.RecordBatch.from_pydict(columns)

    frame = map_predictions(spark, model, snapshot, [label], result, f"{SPARK_SCHEMA}, outputs int")
    sums = [F.sum(name).alias(name) for name in SUMS]
    merged = frame.groupBy(*KEYS).agg(*sums, F.max("outputs").alias("outputs")).collect()
    found = {name: np.array([row[name] for row in merged]) for name in (*KEYS, *SUMS, "outputs")}
    _refuse_several_outputs(int(found["outputs"].max()))
    _refuse_unknown(snapshot, label, bool(np.isnan(found["labels"]).any()), not np.isfinite(found["absolutes"]).all())
    return metrics_of_tally(found, model.statistics.label_means[label])


def _labels(kept: pa.Table) -> Array:
    """The label column as float64; nulls are NaN."""
    return np.asarray(kept.column(0).cast(pa.float64()), dtype=np.float64)


def _outputs(scores: Array) -> int:
    return 1 if scores.ndim == 1 else int(np.prod(scores.shape[1:]))


def _refuse_several_outputs(outputs: int) -> None:
    if outputs != 1:
        raise ModelError(f"the model gives {outputs} numbers a row; evaluation needs one.", fix="Use one output.")


def _refuse_unknown(snapshot: Snapshot, label: str, null_labels: bool, odd_scores: bool) -> None:
    if null_labels:
        raise InputError(f"{snapshot.uri}: label {label!r} has nulls.", fix="Filter them out with where().")
    if odd_scores:
        raise ModelError(
            "the model gives scores that are not finite: its training diverged, or a feature is not finite.",
            fix="Lower the learning rate, or check the features, and train again.",
        )
