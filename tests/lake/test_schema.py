"""Schemas: what a file may say, what it becomes, and how a wrong one is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pyarrow as pa
import pytest

from dl_on_spark.errors import MissingExtraError, SchemaError
from dl_on_spark.lake.schema import Schema

TEXT = """
name: flight_features
fields:
  distance: {type: float, role: feature, nulls: indicator, checks: {min: 0}, preprocess: standardize}
  carrier: {type: string, role: feature, preprocess: {vocabulary: {max: 64, oov: 2}}}
  hour: {type: int, role: feature, preprocess: {bucketize: {boundaries: [6, 12, 18]}}}
  image: {type: binary, shape: [4, 4, 3], dtype: float32, codec: ndarray}
  weight: {type: double, role: weight}
  delayed: {type: int, role: label, checks: {in: [0, 1]}}
  date: {type: date, role: partition}
"""


def test_a_schema_survives_its_yaml_text() -> None:
    schema = Schema.from_yaml(TEXT)
    assert Schema.from_yaml(schema.to_yaml()) == schema
    assert schema.feed_columns == ["distance", "carrier", "hour", "delayed", "weight"]


@pytest.mark.parametrize("check", ["min: 2013-01-01", "max: '2013-01-01'", "in: [2013-01-01, '2013-01-02']"])
def test_dates_in_checks_may_be_quoted_or_not_and_survive_yaml(check: str) -> None:
    schema = Schema.from_yaml(f"name: t\nfields:\n  day: {{type: date, checks: {{{check}}}}}\n")
    assert Schema.from_yaml(schema.to_yaml()) == schema
    assert "2013-01-01" in schema.to_yaml()


def test_tensor_specs_are_those_after_preprocessing() -> None:
    schema = Schema.from_yaml(TEXT)
    assert schema["distance"].tensor_spec() == ((), "float32")
    assert schema["carrier"].tensor_spec() == ((), "int32")
    assert schema["image"].tensor_spec() == ((4, 4, 3), "float32")
    assert schema["date"].tensor_spec() == ((), "int32")
    assert schema["carrier"].cardinality == 66
    assert schema["hour"].cardinality == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{type: int, rolle: feature}", "did you mean 'role'"),
        ("{type: int, checks: {mim: 0}}", "did you mean"),
        ("{type: quux}", "not one that can be used"),
        ("{type: string, preprocess: standardize}", "needs numbers"),
        ("{type: string, preprocess: {vocabulary: {}}}", "needs the option 'max'"),
        ("{type: int, nulls: drop}", "nulls"),
        ("{type: int, preprocess: {vocabulary: {max: 3, oov: 0}}}", "oov must be a whole number from 1 on, not 0"),
        ("{type: int, preprocess: {hash: {buckets: many}}}", "buckets must be a whole number"),
        ("{type: int, preprocess: {bucketize: {boundaries: [3, 1]}}}", "a list of increasing numbers"),
        ("{type: int, preprocess: {bucketize: {quantiles: 1}}}", "quantiles must be a whole number from 2 on"),
        ("{type: binary, preprocess: {vocabulary: {max: 3}}}", "needs numbers or text"),
        ("{type: int, checks: {in: [EWR]}}", "checks.in: 'EWR' is no value of type int"),
        ("{type: date, checks: {min: 5}}", "checks.min: 5 is no value of type date"),
        ("{type: string, checks: {max: 5}}", "checks.max: 5 is no value of type string"),
        ("{type: int, checks: {regex: a}}", "checks.regex needs text"),
        ("{type: float, nulls: {fill: many}}", "nulls.fill: 'many' is no value of type float"),
        ("{type: int, nulls: {fill: 0.5}}", "nulls.fill: 0.5 is no value of type int"),
        ("{type: string, nulls: {fill: null}}", "nulls.fill: None is no value of type string"),
        ("{type: 'array<int>', nulls: {fill: x}}", "nulls.fill: 'x' is no value of type array<int>"),
        ("{type: int, null: indicator}", "None is no entry's name"),
        ("{type: float, nulls: {}}", "nulls.fill: None is no value of type float"),
        ("{type: float, nulls: {fill: .nan}}", "nulls.fill: nan is no value of type float"),
        ("{type: float, checks: {min: .nan}}", "checks.min: nan is no value of type float"),
        ("{type: float, checks: {max: .inf}}", "checks.max: inf is no value of type float"),
        ("{type: int, checks: {in: [1, null]}}", "checks.in: None is no value of type int"),
        ("{type: int, checks: {in: []}}", "checks: no value passes"),
        ("{type: int, checks: {min: 2, max: 1}}", "checks: no value passes"),
        ("{type: int, dtype: floot}", "dtype: 'floot' is none; known: bool, float16"),
        ("{type: int, dtype: string}", "dtype string is none that int can be fed as"),
        ("{type: string, dtype: int32}", "dtype int32 is none that string can be fed as"),
        ("{type: 'array<int>', shape: [2, 0]}", "shape: a size of 0"),
        ("{type: string, role: weight}", "a weight is one number a row"),
        ("{type: int, preprocess: {hash: {buckets: 3000000000}}}", "buckets must be a whole number"),
        ("{type: int, type: long}", "the entry 'type' is there twice"),
    ],
)
def test_a_wrong_entry_is_refused_with_file_field_and_reason(tmp_path: Path, wrong: str, said: str) -> None:
    file = tmp_path / "flights.yaml"
    file.write_text(f"name: flights\nfields:\n  carrier: {wrong}\n")
    with pytest.raises(SchemaError) as caught:
        Schema.load(file)
    assert str(file) in str(caught.value)
    assert "'carrier'" in str(caught.value) or "line 3" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("on: {type: int}", "YAML reads a field's name as True"),
        ("null: {type: int}", "YAML reads a field's name as None"),
        ("'': {type: int}", "name: String should have at least 1 character"),
        ("a: {type: int, role: weight}\n  b: {type: int, role: weight}", "the weights a, b"),
        ("a: {type: int, nulls: indicator}\n  a_is_null: {type: int}", "has the name of the indicator of 'a'"),
    ],
)
def test_fields_that_cannot_stand_beside_each_other_are_refused(fields: str, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        Schema.from_yaml(f"name: t\nfields:\n  {fields}\n")


@pytest.mark.parametrize(
    "field",
    [
        "{type: date, nulls: {fill: 2013-06-01}}",
        "{type: date, nulls: {fill: '2013-06-01'}}",
        "{type: 'decimal(10,2)', nulls: {fill: 0.5}}",
        "{type: 'array<float>', shape: [2], nulls: {fill: 0}}",
        "{type: string, nulls: {fill: unknown}}",
        "{type: boolean, nulls: {fill: false}}",
    ],
)
def test_a_fill_of_the_columns_type_is_taken(field: str) -> None:
    assert Schema.from_yaml(f"name: t\nfields:\n  x: {field}\n")["x"].nulls != "refuse"


def test_missing_columns_and_wrong_types_are_named_before_launch() -> None:
    schema = Schema.from_yaml(TEXT)
    good = schema.to_arrow()
    schema.check(good, "lake/flights")
    with pytest.raises(SchemaError, match="lake/flights has no column 'carrier'"):
        schema.check(good.remove(good.get_field_index("carrier")), "lake/flights")
    wrong = good.set(good.get_field_index("delayed"), pa.field("delayed", pa.string()))
    with pytest.raises(SchemaError, match="'delayed' has type string"):
        schema.check(wrong, "lake/flights")


def test_spark_and_arrow_views_agree() -> None:
    from pyspark.sql.pandas.types import to_arrow_type

    schema = Schema.from_yaml(TEXT)
    spark = schema.to_spark()
    assert [to_arrow_type(f.dataType) for f in spark] == [field.type for field in schema.to_arrow()]


def test_keras_inputs_hold_an_indicator_beside_each_field_that_asks_for_one() -> None:
    inputs = Schema.from_yaml(TEXT).keras_inputs()
    assert list(inputs) == ["distance", "distance_is_null", "carrier", "hour"]
    assert inputs["carrier"].dtype == "int32"


def test_petastorms_view_names_the_extra_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "petastorm.unischema", None)
    with pytest.raises(MissingExtraError, match="petastorm"):
        Schema.from_yaml(TEXT).to_unischema()


@pytest.mark.parametrize("name", ["flights", "weather", "planes", "flight_features"])
def test_every_schema_of_the_repository_loads(name: str) -> None:
    origin = importlib.util.find_spec("dl_on_spark").origin  # type: ignore[union-attr]
    schema = Schema.load(Path(str(origin)).parents[1] / "schemas" / f"{name}.yaml")
    assert schema.name == name
