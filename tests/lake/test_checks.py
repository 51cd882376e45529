"""Checks: each bad row gets all of its reasons in one pass, and too many of them stop the night."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dl_on_spark.errors import DataContractError, SchemaError
from dl_on_spark.lake.checks import enforce, good_rows, rejected_rows, report_of, with_reasons
from dl_on_spark.lake.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema.from_yaml(
    """
name: flights
fields:
  id: {type: int, checks: {not_null: true, unique: true}}
  distance: {type: double, checks: {min: 0, max: 100}}
  origin: {type: string, checks: {in: [EWR, JFK]}}
  carrier: {type: string, checks: {regex: "[A-Z]{2}", fraction: 0.5}}
"""
)
ROWS = [
    ("1", "10", "EWR", "UA"),
    ("2", "far", "EWR", "UA"),
    ("3", "-1", "LGA", "UA"),
    ("4", "101", None, "UAX"),
    ("5", None, "JFK", None),
    ("6", "1", "JFK", "UA"),
    ("6", "1", "JFK", "UA"),
    (None, "1", "JFK", "UA"),
]


def test_each_row_gets_every_reason_and_text_that_is_no_number_is_one(spark: SparkSession) -> None:
    checked = with_reasons(
        spark.createDataFrame(ROWS, "id string, distance string, origin string, carrier string"), SCHEMA, text=True
    ).cache()
    report = report_of(checked, SCHEMA)
    assert (report.rows, report.rejected) == (8, 6)
    assert report.reasons == {
        "id: not unique": 2,
        "distance: not double": 1,
        "distance: below 0": 1,
        "origin: not one of EWR, JFK": 1,
        "distance: above 100": 1,
        "carrier: does not match [A-Z]{2}": 1,
        "id: null": 1,
    }
    assert sorted(row.id for row in good_rows(checked).collect()) == [1, 5]
    assert rejected_rows(checked).count() == 6
    checked.unpersist()


def test_too_many_rejected_rows_are_an_error_that_names_the_worst_checks(spark: SparkSession) -> None:
    rows = spark.createDataFrame(ROWS, "id string, distance string, origin string, carrier string")
    report = report_of(with_reasons(rows, SCHEMA, text=True), SCHEMA)
    enforce(report, SCHEMA, max_rejected=0.75)
    with pytest.raises(DataContractError, match=r"6 of 8 rows .*id: not unique \(2\)"):
        enforce(report, SCHEMA, max_rejected=0.5)


def test_a_field_may_demand_a_share_of_its_own(spark: SparkSession) -> None:
    rows = spark.createDataFrame(
        [(str(i), "1", "EWR", "nope") for i in range(3)], "id string, distance string, origin string, carrier string"
    )
    report = report_of(with_reasons(rows, SCHEMA, text=True), SCHEMA)
    with pytest.raises(DataContractError, match=r"'carrier' passes its checks in 0\.0%"):
        enforce(report, SCHEMA, max_rejected=1.0)


def test_a_missing_column_is_named(spark: SparkSession) -> None:
    with pytest.raises(SchemaError, match="'distance'"):
        with_reasons(spark.createDataFrame([("1",)], "id string"), SCHEMA, text=True)


def test_every_kind_of_check_holds_for_typed_columns_and_for_text(spark: SparkSession) -> None:
    schema = Schema.from_yaml(
        """
name: t
fields:
  day: {type: date, checks: {min: 2013-01-01, max: 2013-12-31}}
  at: {type: timestamp, checks: {min: "2013-01-01 00:00:00"}}
  n: {type: bigint, nullable: false, checks: {in: [1, 2]}}
  price: {type: "decimal(10,2)", checks: {min: 0.5}}
  word: {type: string, checks: {in: [a, b], unique: true}}
  flag: {type: boolean, checks: {in: [true]}}
"""
    )
    rows = [
        ("2013-06-01", "2013-06-01 05:00:00", "1", "0.50", "a", "true"),
        ("2014-01-01", "2012-12-31 23:59:59", "3", "0.49", "c", "false"),
        (None, None, None, None, None, None),
    ]
    text = spark.createDataFrame(rows, "day string, at string, n string, price string, word string, flag string")
    typed = text.select(*(text[field.name].cast(field.dataType) for field in schema.to_spark()))
    expected = {
        "day: above 2013-12-31",
        "at: below 2013-01-01 00:00:00",
        "n: not one of 1, 2",
        "price: below 0.5",
        "word: not one of a, b",
        "flag: not one of True",
    }
    for frame, is_text in ((text, True), (typed, False)):
        checked = with_reasons(frame, schema, text=is_text)
        assert checked.drop("reasons").schema.simpleString() == typed.schema.simpleString()
        found = {row.word: set(row.reasons) for row in checked.collect()}
        assert found == {"a": set(), "c": expected, None: {"n: null"}}


def test_what_is_no_finite_number_or_no_whole_row_is_a_reason(spark: SparkSession) -> None:
    schema = Schema.from_yaml(
        """
name: t
fields:
  id: {type: int}
  x: {type: double, nullable: false}
  y: {type: float}
"""
    )
    rows = [
        ("1", "NaN", "NaN", None),
        ("2", "-Infinity", "1", None),
        ("3", "1", "Infinity", None),
        ("4", None, None, None),
        ("5", "2", "3", "5,2,3,4"),
        ("6", "2", "3", None),
    ]
    frame = spark.createDataFrame(rows, "id string, x string, y string, _corrupt_record string")
    checked = with_reasons(frame, schema, text=True).collect()
    assert {row.id: row.reasons for row in checked} == {
        1: ["x: NaN"],
        2: ["x: infinite"],
        3: ["y: infinite"],
        4: ["x: null"],
        5: ["row: its values do not fit the columns"],
        6: [],
    }
