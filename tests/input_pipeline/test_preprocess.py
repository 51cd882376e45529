"""Columns to tensors: types, nulls and preprocessing give the right values and one dtype."""

import datetime
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from dl_on_spark.errors import SchemaError
from dl_on_spark.input_pipeline.hashing import stable_buckets
from dl_on_spark.input_pipeline.preprocess import Preprocessor
from dl_on_spark.lake.schema import Schema


def apply(spec, column, **known):
    schema = Schema.from_dict({"name": "s", "fields": {"x": {"role": "feature", **spec}}})
    facts = {"mean": None, "std": None, "vocabulary": None, "boundaries": None, **known}
    statistics = SimpleNamespace(fields={"x": SimpleNamespace(**facts)}) if known else None
    found = Preprocessor(schema, statistics).apply(pa.table({"x": column}), source="part-0")
    shape, dtype = schema["x"].tensor_spec()
    assert found["x"].shape == (len(column), *shape)
    assert found["x"].dtype == (object if dtype == "string" else np.dtype(dtype))
    return found if len(found) > 1 else found["x"]


UTC = datetime.UTC
NOON_9999 = datetime.datetime(9999, 12, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("type_", "column", "values"),
    [
        ("int", pa.array([1, -2], pa.int32()), [1, -2]),
        ("bigint", pa.array([1, 2], pa.int16()), [1, 2]),
        ("float", pa.array([0.5, 1.5], pa.float32()), [0.5, 1.5]),
        ("boolean", pa.array([True, False]), [True, False]),
        ("string", pa.array(["a", "é", "a"]), ["a", "é", "a"]),
        ("string", pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        ("binary", pa.array([b"\x00", b""]), [b"\x00", b""]),
        ("date", pa.array([datetime.date(1970, 1, 3)]), [2]),
        ("timestamp", pa.array([1_500], pa.timestamp("ns", "UTC")), [1]),
        ("timestamp", pa.array([2], pa.timestamp("ms", "UTC")), [2_000]),
        ("timestamp", pa.array([NOON_9999], pa.timestamp("s", "UTC")), [253402257600_000_000]),
        ("decimal(18,4)", pa.array([Decimal("1.2500")], pa.decimal128(18, 4)), [1.25]),
    ],
)
def test_each_type_gives_its_values(type_, column, values):
    assert apply({"type": type_}, column).tolist() == values


def test_a_timestamp_that_does_not_fit_microseconds_is_an_error_and_never_wraps():
    with pytest.raises(SchemaError, match="Column 'x' of part-0"):
        apply({"type": "timestamp"}, pa.array([2**60], pa.timestamp("s", "UTC")))


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 4)])
def test_lists_of_one_length_become_rows_times_shape(kind):
    column = pa.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], kind)[1:]
    assert apply({"type": "array<float>", "shape": [4]}, column).tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert apply({"type": "array<float>", "shape": [2, 2]}, column)[0].tolist() == [[5, 6], [7, 8]]


def test_a_list_of_another_length_is_refused_with_both_lengths():
    with pytest.raises(SchemaError, match="a list of 3 values where the schema's shape asks for 2"):
        apply({"type": "array<int>", "shape": [2]}, pa.array([[1, 2], [1, 2, 3]], pa.list_(pa.int32())))


@pytest.mark.parametrize(
    ("type_", "column"),
    [
        ("int", pa.array([1, None], pa.int32())),
        ("string", pa.array(["a", None]).dictionary_encode()),
        ("array<int>", pa.array([[1, 2], None], pa.list_(pa.int32()))),
        ("array<int>", pa.array([[1, 2], [None, 4]], pa.list_(pa.int32()))),
    ],
)
def test_nulls_are_refused_by_default_naming_column_and_place(type_, column):
    shape = {"shape": [2]} if "array" in type_ else {}
    with pytest.raises(SchemaError, match=r"Column 'x' of part-0 has \d nulls") as refused:
        apply({"type": type_, **shape}, column)
    assert "nulls: indicator" in refused.value.fix


def test_nulls_are_filled_also_when_a_whole_batch_is_null():
    spec = {"type": "int", "nulls": {"fill": 7}}
    assert apply(spec, pa.array([1, None], pa.int32())).tolist() == [1, 7]
    assert apply(spec, pa.array([None, None], pa.int32())).tolist() == [7, 7]
    lists = pa.array([[1, None], None], pa.list_(pa.int32()))
    assert apply({"type": "array<int>", "shape": [2], "nulls": {"fill": 0}}, lists).tolist() == [
        [1, 0],
        [0, 0],
    ]
    days = pa.array([None], pa.date32())
    assert apply({"type": "date", "nulls": {"fill": "1970-01-02"}}, days).tolist() == [1]
    money = pa.array([None], pa.decimal128(6, 2))
    assert apply({"type": "decimal(6,2)", "nulls": {"fill": 1.5}}, money).tolist() == [1.5]


def test_an_indicator_says_where_nulls_were():
    found = apply({"type": "string", "nulls": "indicator"}, pa.array(["a", None]).dictionary_encode())
    assert found["x"].tolist() == ["a", ""]
    assert found["x_is_null"].tolist() == [0.0, 1.0]
    assert found["x_is_null"].dtype == np.float32
    spec = {"type": "double", "nulls": "indicator", "preprocess": "standardize"}
    assert apply(spec, pa.array([12.0, None]), mean=10.0, std=2.0)["x"].tolist() == [1.0, 0.0]


def test_standardize_uses_the_statistics_and_survives_a_constant_column():
    spec = {"type": "float", "preprocess": "standardize"}
    assert apply(spec, pa.array([1.0, 3.0], pa.float32()), mean=1.0, std=2.0).tolist() == [0.0, 1.0]
    assert apply(spec, pa.array([5.0], pa.float32()), mean=5.0, std=0.0).tolist() == [0.0]
    with pytest.raises(SchemaError, match="preprocessed by statistics"):
        apply(spec, pa.array([1.0], pa.float32()))


@pytest.mark.parametrize("encode", [lambda a: a, lambda a: a.dictionary_encode()])
def test_a_vocabulary_numbers_known_words_after_the_unknown_buckets(encode):
    column = encode(pa.array(["b", "zz", "a", "b"]))
    one = {"type": "string", "preprocess": {"vocabulary": {"max": 8}}}
    assert apply(one, column, vocabulary=["a", "b"]).tolist() == [2, 0, 1, 2]
    three = {"type": "string", "preprocess": {"vocabulary": {"max": 8, "oov": 3}}}
    found = apply(three, column, vocabulary=["a", "b"])
    assert found[[0, 2, 3]].tolist() == [4, 3, 4]
    assert found[1] == stable_buckets(pa.array(["zz"]), 3)[0]


def test_bucketize_puts_a_boundary_into_the_upper_bucket():
    spec = {"type": "int", "preprocess": {"bucketize": {"boundaries": [0, 10]}}}
    assert apply(spec, pa.array([-1, 0, 9, 10], pa.int32())).tolist() == [0, 1, 1, 2]
    quantiles = {"type": "int", "preprocess": {"bucketize": {"quantiles": 2}}}
    assert apply(quantiles, pa.array([1, 9], pa.int32()), boundaries=[5.0]).tolist() == [0, 1]


def test_hash_buckets_agree_with_the_documented_hash_and_never_change():
    def expected(text: str) -> int:
        value = 0xCBF29CE484222325
        for byte in text.encode():
            value = ((value ^ byte) * 0x100000001B3) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = ((value ^ (value >> shift)) * factor) % 2**64
        return (value ^ (value >> 31)) % 1000

    words = ["", "a", "carrier", "é" * 40, "a"]
    assert stable_buckets(pa.array(words), 1000).tolist() == [expected(word) for word in words]
    assert stable_buckets(pa.array(["x", *words])[1:], 1000).tolist() == [expected(word) for word in words]
    whole = stable_buckets(pa.array([5], pa.int32()), 1000)
    assert whole.tolist() == stable_buckets(pa.array([5], pa.int64()), 1000).tolist()
    assert apply({"type": "string", "preprocess": {"hash": {"buckets": 1000}}}, pa.array(["a"])).tolist() == [
        expected("a")
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "array<int>"}, "is a list .* of any length"),
        ({"type": "binary", "codec": "ndarray"}, "is encoded .* without a shape"),
        ({"type": "int", "shape": [2]}, "has a shape, but its type int is not a list"),
    ],
)
def test_fields_without_a_tensor_are_refused_by_name(spec, message):
    with pytest.raises(SchemaError, match=f"Field 'x' {message}"):
        Preprocessor(Schema.from_dict({"name": "s", "fields": {"x": {"role": "feature", **spec}}}), None)


def test_scoring_may_lack_the_label_but_no_feature():
    fields = {"x": {"type": "int", "role": "feature"}, "y": {"type": "int", "role": "label"}}
    preprocessor = Preprocessor(Schema.from_dict({"name": "s", "fields": fields}), None)
    assert list(preprocessor.apply(pa.table({"x": pa.array([1], pa.int32())}))) == ["x"]
    with pytest.raises(SchemaError, match="no column 'x'"):
        preprocessor.apply(pa.table({"y": pa.array([1], pa.int32())}))


NAN = float("nan")


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_nan_is_a_null_to_every_policy(kind):
    column = pa.array([1.0, NAN, None, 3.0], pa.float32()).cast(kind)
    with pytest.raises(SchemaError, match="Column 'x' of part-0 has 2 nulls or NaN among 4 values"):
        apply({"type": "double"}, column)
    assert apply({"type": "double", "nulls": {"fill": -1}}, column).tolist() == [1, -1, -1, 3]
    told = apply({"type": "double", "nulls": "indicator", "preprocess": "standardize"}, column, mean=2.0, std=1.0)
    assert told["x"].tolist() == [-1, 0, 0, 1]
    assert told["x_is_null"].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_an_infinite_value_is_refused_whatever_the_policy(kind):
    for value in (float("inf"), -float("inf")):
        with pytest.raises(SchemaError, match="Column 'x' of part-0 has 1 infinite values among 3"):
            apply({"type": "double", "nulls": "indicator"}, pa.array([1.0, value, NAN], pa.float64()).cast(kind))


def test_finite_numbers_whose_sum_overflows_are_kept():
    large = float(np.finfo(np.float64).max)
    assert apply({"type": "double"}, pa.array([large, large, -large])).tolist() == [large, large, -large]


def test_nan_inside_a_list_is_a_null_too():
    column = pa.array([[1.0, NAN], [2.0, 3.0]], pa.list_(pa.float32()))
    spec = {"type": "array<float>", "shape": [2], "nulls": {"fill": 0}}
    assert apply(spec, column).tolist() == [[1, 0], [2, 3]]
