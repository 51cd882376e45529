"""Statistics: partial summaries merge to those of all rows, and only the snapshot's rows count."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PythonException

from dl_on_spark.errors import SchemaError
from dl_on_spark.lake import Schema, Statistics, compute_statistics, open_table
from dl_on_spark.lake.schema import Field
from dl_on_spark.lake.statistics import _finish, merge, partial_of
from dl_on_spark.launch.barrier import input_error

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


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(-5, 5) | st.none(), max_size=9), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_words_are_counted_whatever_the_order_and_grouping_of_the_parts(parts, order) -> None:
    spec = Schema.from_yaml("{name: t, fields: {k: {type: int, role: feature, preprocess: {vocabulary: {max: 4}}}}}")[
        "k"
    ]
    values = [value for part in parts for value in part if value is not None]
    partials = [{"k": partial_of(pa.chunked_array([pa.array(part, pa.int32())]), spec)} for part in parts]
    order.shuffle(partials)
    cut = order.randint(0, len(partials))
    grouped = [json.loads(json.dumps(merge(group))) for group in (partials[:cut], partials[cut:]) if group]
    found = merge(grouped)["k"]
    assert (found["count"], found["nulls"]) == (len(values), sum(map(len, parts)) - len(values))
    if values:
        ranked = sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))
        assert _finish(spec, found).vocabulary == tuple(word for word, _ in ranked[:4])


@pytest.mark.parametrize("distribution", ["normal", "exponential", "few values"])
def test_quantile_boundaries_cut_the_rows_into_equal_parts(distribution: str) -> None:
    rng = np.random.default_rng(3)
    draw = {
        "normal": lambda n: rng.normal(100, 5, n),
        "exponential": lambda n: rng.exponential(3, n),
        "few values": lambda n: rng.integers(0, 4, n).astype(float),
    }[distribution]
    parts = [draw(n) for n in (9_000, 1, 250, 4_000, 12_345)]
    merged = merge({"q": partial_of(pa.chunked_array([part]), SCHEMA["q"])} for part in parts)["q"]
    boundaries = _finish(SCHEMA["q"], merged).boundaries
    assert boundaries is not None and list(boundaries) == sorted(boundaries)
    rows = np.sort(np.concatenate(parts))
    for boundary, share in zip(boundaries, (0.25, 0.5, 0.75), strict=True):
        low, high = np.searchsorted(rows, boundary, "left"), np.searchsorted(rows, boundary, "right")
        assert low / rows.size - 0.002 <= share <= high / rows.size + 0.002


def test_a_column_of_nulls_has_nothing_to_learn_from(spark: SparkSession, tmp_path: Path) -> None:
    nothing = pa.array([None, None], pa.float64())
    y = pa.array([0, 1], pa.int32())
    pq.write_table(pa.table({"x": nothing, "q": [1.0, 2.0], "word": ["a", "b"], "y": y}), tmp_path / "t.parquet")
    with pytest.raises(SchemaError, match="'x' has only nulls or NaN"):
        compute_statistics(spark, open_table(tmp_path / "t.parquet").snapshot(), SCHEMA)


def test_a_constant_column_has_no_spread_by_rounding(spark: SparkSession, tmp_path: Path) -> None:
    columns = {"x": [0.1] * 300, "q": [1.0] * 300, "word": ["a"] * 300, "y": pa.array([0] * 300, pa.int32())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=70)
    found = compute_statistics(spark, open_table(tmp_path / "t.parquet").snapshot(), SCHEMA)
    assert (found.fields["x"].std, found.fields["x"].min) == (0.0, 0.1)


@pytest.mark.parametrize("rows", [1, 2])
def test_values_whose_spread_no_float_holds_are_refused_by_name(spark: SparkSession, tmp_path: Path, rows: int) -> None:
    columns = {"x": [1e300, -1e300], "q": [1.0, 2.0], "word": ["a", "b"], "y": pa.array([0, 1], pa.int32())}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=rows)
    with pytest.raises(SchemaError, match=r"'x' has values from -1e\+300 to 1e\+300"):
        compute_statistics(spark, open_table(tmp_path / "t.parquet").snapshot(), SCHEMA)


def test_statistics_of_spark_equal_those_of_pandas(spark: SparkSession, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for n in range(3):
        x = np.where(rng.random(500) < 0.1, np.nan, rng.normal(1e6, 1, 500))
        rows = {"x": pa.array(x, from_pandas=True), "q": rng.random(500), "word": rng.choice(list("abcde"), 500)}
        table = pa.table({**rows, "y": pa.array(rng.integers(0, 2, 500), pa.int32())})
        pq.write_table(table, tmp_path / f"{n}.parquet", row_group_size=100)
    text = "word != 'a' and (x > 1000000 or x is null)"
    found = compute_statistics(spark, open_table(tmp_path).where(text).snapshot(), SCHEMA)
    frame = pd.read_parquet(tmp_path)
    frame = frame[(frame.word != "a") & ((frame.x > 1e6) | frame.x.isna())]
    assert found.rows == len(frame)
    x_found = found.fields["x"]
    assert (x_found.count, x_found.nulls) == (frame.x.count(), frame.x.isna().sum())
    assert (x_found.min, x_found.max) == (frame.x.min(), frame.x.max())
    assert x_found.mean == pytest.approx(frame.x.mean(), rel=1e-12)
    assert x_found.std == pytest.approx(frame.x.std(ddof=0), rel=1e-9)
    counts = frame.word.value_counts()
    assert found.fields["word"].vocabulary == tuple(sorted(counts.index, key=lambda w: (-counts[w], w))[:2])
    assert found.label_means["y"] == pytest.approx(frame.y.mean())


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


def test_nan_counts_as_a_null_and_an_infinite_value_is_refused_by_file(spark: SparkSession, tmp_path: Path) -> None:
    columns = {"q": [1.0] * 5, "word": ["a"] * 5, "y": pa.array([0] * 5, pa.int32())}
    pq.write_table(pa.table({"x": [1.0, None, math.nan, 3.0, 5.0], **columns}), tmp_path / "a.parquet")
    found = compute_statistics(spark, open_table(tmp_path).snapshot(), SCHEMA).fields["x"]
    assert (found.count, found.nulls, found.mean, found.min, found.max) == (3, 2, 3.0, 1.0, 5.0)
    assert found.std == pytest.approx(math.sqrt(8 / 3))
    pq.write_table(pa.table({"x": [1.0, -math.inf, 2.0, 3.0, 5.0], **columns}), tmp_path / "b.parquet")
    with pytest.raises(PythonException) as raised:
        compute_statistics(spark, open_table(tmp_path).snapshot(), SCHEMA)
    told = input_error(raised.value)
    assert isinstance(told, SchemaError) and "'x' has an infinite value in b.parquet" in told.message


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_nan_is_a_null_of_every_float_column_and_never_a_word(kind: pa.DataType) -> None:
    column = pa.chunked_array([pa.array([0.5, math.nan, None, 0.5], pa.float32()).cast(kind)])
    word = Field(name="x", type="double", role="feature", preprocess={"vocabulary": {"max": 3}})
    assert partial_of(column, word) == {"count": 2, "nulls": 2, "words": [[0.5, 2]]}
    plain = partial_of(column, Field(name="x", type="double", role="feature"))
    assert (plain["count"], plain["nulls"], plain["max"]) == (2, 2, 0.5)
