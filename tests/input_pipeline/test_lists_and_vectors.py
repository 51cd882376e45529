"""Lists of several lengths and Spark ML's vectors: each value in its place, as Spark itself reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import SchemaError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.input_pipeline.preprocess import Preprocessor
from dl_on_spark.lake import Schema, compute_statistics
from dl_on_spark.lake.ddl import VECTOR

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def schema_of(**spec: Any) -> Schema:
    return Schema.from_dict({"name": "t", "fields": {"x": {"role": "feature", **spec}}})


def apply(column: pa.Array, **spec: Any) -> np.ndarray:
    return Preprocessor(schema_of(**spec), None).apply(pa.table({"x": column}), source="part-0")["x"]


LISTS = st.lists(st.none() | st.lists(st.none() | st.integers(-9, 9), max_size=4), max_size=8)


@settings(max_examples=200, deadline=None)
@given(LISTS, st.integers(0, 3), st.sampled_from([pa.list_(pa.int64()), pa.large_list(pa.int64())]))
def test_short_lists_are_padded_and_nulls_follow_the_policy(rows: list[Any], skip: int, kind: pa.DataType) -> None:
    found = apply(pa.array(rows, kind)[skip:], type="array<bigint>", shape=[4], pad=77, nulls={"fill": -50})
    expected = [
        [-50] * 4 if row is None else [-50 if value is None else value for value in row] + [77] * (4 - len(row))
        for row in rows[skip:]
    ]
    assert found.tolist() == expected and found.shape == (len(expected), 4)


def test_a_longer_list_is_refused_with_both_lengths() -> None:
    with pytest.raises(SchemaError, match=r"Column 'x' of part-0: a list of 3 values .* asks for 2 at most"):
        apply(pa.array([[1], [1, 2, 3]]), type="array<bigint>", shape=[2], pad=0)


def test_words_of_lists_become_indices_and_padding_is_a_word_too(spark: SparkSession, tmp_path: Path) -> None:
    rows = pa.table({"x": [["a", "b"], ["b"], [], ["b", "c", "a"]]})
    pq.write_table(rows, tmp_path / "t.parquet", row_group_size=2)
    schema = schema_of(type="array<string>", shape=[3], pad="", preprocess={"vocabulary": {"max": 2}})
    statistics = compute_statistics(spark, open_table(tmp_path).snapshot(), schema)
    assert statistics.fields["x"].vocabulary == ("b", "a")
    found = Preprocessor(schema, statistics).apply(rows)["x"]
    assert found.tolist() == [[2, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 2]]
    assert schema["x"].tensor_spec() == ((3,), "int32")


def test_a_pad_without_a_list_or_a_shape_is_refused() -> None:
    for spec in ({"type": "int", "pad": 0}, {"type": "array<int>", "pad": 0}):
        with pytest.raises(SchemaError, match="pad needs a list and a shape"):
            schema_of(**spec)
    with pytest.raises(SchemaError, match="Spark ML's stages"):
        schema_of(type="vector", shape=[2], preprocess="standardize")


VECTORS = st.lists(
    st.none()
    | st.tuples(st.just(1), st.lists(st.floats(-9, 9, width=32), min_size=5, max_size=5))
    | st.tuples(st.just(0), st.dictionaries(st.integers(0, 4), st.floats(-9, 9, width=32))),
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(VECTORS, st.integers(0, 2))
def test_dense_and_sparse_vectors_are_rows_of_one_size(rows: list[Any], skip: int) -> None:
    stored, expected = [], []
    for row in rows:
        if row is None:
            stored.append(None)
            expected.append([-1.0] * 5)
        elif row[0] == 1:
            stored.append({"type": 1, "size": None, "indices": None, "values": row[1]})
            expected.append(row[1])
        else:
            places = sorted(row[1])
            stored.append({"type": 0, "size": 5, "indices": places, "values": [row[1][i] for i in places]})
            expected.append([row[1].get(i, 0.0) for i in range(5)])
    found = apply(pa.array(stored, VECTOR)[skip:], type="vector", shape=[5], nulls={"fill": -1})
    assert found.tolist() == expected[skip:] and found.dtype == np.float64


def test_vectors_that_spark_wrote_are_read_as_spark_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    vectors = [Vectors.dense(1.0, 0.0, 2.5), Vectors.sparse(3, {1: 4.0}), Vectors.sparse(3, {}), Vectors.dense(7, 8, 9)]
    frame = spark.createDataFrame(list(enumerate(vectors)), ["id", "features"])
    frame.coalesce(1).write.parquet(str(tmp_path / "t"))
    written = spark.read.parquet(str(tmp_path / "t")).orderBy("id")
    expected = [row.features.toArray().tolist() for row in written.collect()]
    fields = {
        "id": {"type": "bigint", "role": "key"},
        "features": {"type": "vector", "shape": [3], "dtype": "float32", "role": "feature"},
    }
    schema = Schema.from_dict({"name": "t", "fields": fields})
    (batch,) = open_table(tmp_path / "t").batches(10, schema)
    assert batch["features"].tolist() == expected and batch["features"].dtype == np.float32
    assert schema.to_spark()["features"].dataType == frame.schema["features"].dataType
    wrong = Schema.from_dict({"name": "t", "fields": {"features": {"type": "vector", "shape": [4], "role": "feature"}}})
    with pytest.raises(SchemaError, match="a vector of 3 values where the schema's shape asks for 4"):
        list(open_table(tmp_path / "t").batches(10, wrong))
