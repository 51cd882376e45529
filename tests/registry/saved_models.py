"""Small real tables and saved Keras models for the tests of registry, scoring and jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dl_on_spark.lake import Schema, compute_statistics, open_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA_YAML = """
name: clicks
fields:
  id: {type: bigint, role: key, nullable: false}
  x: {type: double, role: feature, preprocess: standardize, nulls: {fill: 0}}
  word: {type: string, role: feature, preprocess: {vocabulary: {max: 2}}}
  y: {type: int, role: label}
  date: {type: date, role: partition}
"""
SCHEMA = Schema.from_yaml(SCHEMA_YAML)


def write_day(
    table: Path, day: str, x: Sequence[float | None], y: Sequence[Any] | None, *, first_id: int = 0, group: int = 3
) -> None:
    """One day's partition in row groups of `group` rows; without `y` the column is not there."""
    folder = table / f"date={day}"
    folder.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {
        "id": pa.array(range(first_id, first_id + len(x)), pa.int64()),
        "x": pa.array(x, pa.float64()),
        "word": [("a", "b", "unseen")[i % 3] for i in range(len(x))],
    }
    if y is not None:
        columns["y"] = pa.array(y, pa.int32() if all(isinstance(v, int | None) for v in y) else pa.float64())
    pq.write_table(pa.table(columns), folder / "part-00000.parquet", row_group_size=group)


def save_run(
    spark: SparkSession,
    folder: Path,
    table: Path,
    train_where: str,
    model: Callable[[], Any],
    schema: Schema = SCHEMA,
) -> None:
    """A run's folder as the trainer leaves it: model.keras, schema.yaml, statistics.json, snapshot.json."""
    snapshot = open_table(table).where(train_where).snapshot()
    folder.mkdir(parents=True, exist_ok=True)
    model().save(folder / "model.keras")
    (folder / "schema.yaml").write_text(schema.to_yaml())
    (folder / "statistics.json").write_text(compute_statistics(spark, snapshot, schema).to_json())
    (folder / "snapshot.json").write_text(snapshot.to_json())


def linear(weight: float = 1.0, bias: float = 0.0, *, activation: str = "sigmoid", outputs: int = 1) -> Any:
    """``activation(weight * standardized x + bias)``; the word has no say."""
    import keras

    inputs = SCHEMA.keras_inputs()
    dense = keras.layers.Dense(outputs, activation=activation)
    x = keras.layers.Reshape((1,))(inputs["x"])
    model = keras.Model(inputs, dense(x))
    dense.set_weights([np.full((1, outputs), weight, np.float32), np.full(outputs, bias, np.float32)])
    return model


def expected_scores(x: Sequence[float], mean: float, std: float, weight: float = 1.0, bias: float = 0.0) -> Any:
    """What `linear` gives, computed without Keras."""
    return 1 / (1 + np.exp(-(weight * (np.asarray(x) - mean) / std + bias)))
