"""Statistics: partial summaries merge to those of all rows, and only the snapshot's rows count."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.lake import Schema, Statistics, compute_statistics, open_table
from dl_on_spark.lake.statistics import merge, partial_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema.from_yaml(
    """
name: t
fields:
  x: {type: double, role: feature, preprocess: standardize}
  q: {type: double, role: feature, preprocess: {bucketize: {quantiles: 4}}}
  word: {type: string, role: feature, preprocess: {vocabulary: {max: 2}}}
  y: {type: int, role: label}
  date: {type: date, role: partition}
"""
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), min_size=1, max_size=5))
def test_mean_and_spread_do_not_depend_on_how_rows_are_dealt(parts: list[list[float]]) -> None:
    found = merge({"x": partial_of(pa.chunked_array([pa.array(p, pa.float64())]), SCHEMA["x"])} for p in parts)["x"]
    values = np.concatenate([np.asarray(p, dtype=np.float64) for p in parts])
    assert found["count"] == values.size
    if values.size:
        assert found["mean"] == pytest.approx(values.mean(), rel=1e-9, abs=1e-6)
        assert found["squares"] == pytest.approx(np.square(values - values.mean()).sum(), rel=1e-6, abs=1e-3)


def test_statistics_are_those_of_the_filtered_snapshot_and_survive_json(spark: SparkSession, tmp_path: Path) -> None:
    for day, words in (("2013-06-01", "bbaac"), ("2013-06-02", "zzzzz")):
        folder = tmp_path / f"date={day}"
        folder.mkdir()
        numbers = pa.array([1.0, 2.0, 3.0, 4.0, None])
        table = pa.table({"x": numbers, "q": numbers, "word": list(words), "y": pa.array([0, 0, 0, 0, 1], pa.int32())})
        pq.write_table(table, folder / "part-0.parquet", row_group_size=2)
    snapshot = open_table(tmp_path).where("date = '2013-06-01'").snapshot()
    found = compute_statistics(spark, snapshot, SCHEMA)
    assert found.rows == 5
    assert found.fingerprint == snapshot.fingerprint
    assert found.fields["word"].vocabulary == ("a", "b")
    assert (found.fields["x"].mean, found.fields["x"].nulls) == (2.5, 1)
    assert found.fields["x"].std == pytest.approx(np.std([1, 2, 3, 4]))
    assert found.fields["q"].boundaries == (1.0, 2.0, 3.0)
    assert found.label_means == {"y": 0.2}
    assert Statistics.from_json(found.to_json()) == found
