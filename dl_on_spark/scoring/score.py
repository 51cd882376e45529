"""Batch inference: a published version over one day's partition of the feature table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import ModelError, SchemaError, TableError
from dl_on_spark.lake import Table
from dl_on_spark.lake.writes import write_partitions
from dl_on_spark.registry.predictions import SavedModel, map_predictions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_OWN_COLUMNS = ("score", "model_version")


@dataclass(frozen=True)
class ScoreReport:
    """What was scored, and where it is."""

    uri: str
    rows: int
    mean_score: float
    model_version: int


def score(
    spark: SparkSession,
    model: SavedModel,
    version: int,
    table: Table,
    output: str,
    *,
    date_column: str = "date",
    batch_rows: int = 8_192,
) -> ScoreReport:
    """Write one row a row of `table`: its keys, ``score``, ``model_version`` and the date column.

    Schema and statistics are the model's, never those of today's table; labels are not read. Partitions of
    `output` are replaced whole, so scoring a day again is safe.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import FloatType, IntegerType, StructField, StructType

    snapshot = table.snapshot(spark)
    keys = [field.name for field in model.schema.keys]
    if not keys:
        raise SchemaError(
            f"{model.schema.source} has no key: its scores would belong to no row.",
            fix="Give the columns that name a row the role key, and train again.",
        )
    kept = list(dict.fromkeys([*keys, date_column]))
    for name in kept:
        if name in _OWN_COLUMNS:
            raise SchemaError(
                f"{model.schema.source}: column {name!r} has the name of a column that scoring adds.",
                fix="Rename it in the feature table.",
            )
        if name not in snapshot.schema.names:
            raise TableError(
                f"{snapshot.uri} has no column {name!r}, which the scores are kept by.",
                fix="Score a table with the model's key and date columns.",
            )

    def result(columns: pa.Table, scores: npt.NDArray[np.float32]) -> Iterator[pa.RecordBatch]:
        if scores.ndim != 1:
            raise ModelError(
                f"the model gives {scores.shape[1:]} numbers a row; the scores table holds one.",
                fix="Publish a model with one output.",
            )
        versions = pa.array(np.full(len(scores), version, np.int32))
        whole = columns.append_column("score", pa.array(scores)).append_column("model_version", versions)
        yield from whole.combine_chunks().to_batches()

    schema = StructType(
        [
            *(StructField(name, from_arrow_type(snapshot.schema.field(name).type)) for name in kept),
            StructField("score", FloatType()),
            StructField("model_version", IntegerType()),
        ]
    )
    scored = map_predictions(spark, model, snapshot, kept, result, schema, batch_rows).persist()
    try:
        mean = scored.agg(F.avg("score")).collect()[0][0]
        written = write_partitions(scored, output, partition_by=date_column, sort_by=keys)
    finally:
        scored.unpersist()
    if written.rows != snapshot.rows:
        raise TableError(
            f"{written.rows} scores were written for {snapshot.rows} rows of {snapshot.uri}.",
            fix="This is a fault of dl_on_spark: please report it with the table's inspection.",
        )
    return ScoreReport(output, written.rows, float(mean), version)
