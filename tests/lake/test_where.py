"""The filter language: it means what Spark SQL means, prunes nothing that passes, and names what is wrong."""

from __future__ import annotations

import datetime
import math
import random
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import TableError
from dl_on_spark.lake import open_table, where

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema(
    [
        ("i", pa.int32()),
        ("l", pa.int64()),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("money", pa.decimal128(10, 2)),
    ]
)
DAYS = [datetime.date(2013, 6, day) for day in (1, 2, 3)]
VALUES = {
    "i": [-1, 0, 1, 7],
    "l": [-(2**40), 0, 5, 2**40],
    "f": [-1.5, 0.0, 0.1, 2.0, math.nan],
    "d": [-1.5, -0.0, 0.0, 0.1, 2.0, math.nan],
    "s": ["", "JFK", "O'Hare", "jfk", "é"],
    "b": [True, False],
    "day": DAYS,
    "at": [datetime.datetime(2013, 6, day, 12, tzinfo=datetime.UTC) for day in (1, 2, 3)],
    "money": [Decimal("-0.50"), Decimal("1.00"), Decimal("99.99")],
}
LITERALS = {
    "i": ["-1", "0", "1", "0.5", "3000000000"],
    "l": ["0", "5", "1099511627776", "2.5"],
    "f": ["0", "0.1", "2.0", "-1.5", "'NaN'"],
    "d": ["0", "0.1", "2", "-1.5", "'NaN'"],
    "s": ["''", "'JFK'", "'O\\'Hare'", "'k'"],
    "b": ["true", "false"],
    "day": ["'2013-06-02'", "date '2013-06-01'", "DATE'2013-06-03'", "'2014-01-01'"],
    "at": ["'2013-06-02 12:00:00'", "timestamp '2013-06-01 12:00:00'", "'2013-06-02'"],
    "money": ["1", "99.99", "0.005", "-0.5"],
}


def random_filter(rng: random.Random, depth: int = 3) -> str:
    if depth and rng.random() < 0.6:
        kind = rng.choice(["and", "or", "not", "paren"])
        if kind == "not":
            return f"not ({random_filter(rng, depth - 1)})"
        if kind == "paren":
            return f"({random_filter(rng, depth - 1)})"
        return f"{random_filter(rng, depth - 1)} {kind} {random_filter(rng, depth - 1)}"
    column = rng.choice(list(VALUES))
    a, b = rng.choice(LITERALS[column]), rng.choice(LITERALS[column])
    operator = rng.choice(["=", "==", "!=", "<>", "<", "<=", ">", ">="])
    return rng.choice(
        [
            f"{column} {operator} {a}",
            f"{a} {operator} {column}",
            f"{column} in ({a}, {b})",
            f"{column} not in ({a}, {b})",
            f"{column} between {a} and {b}",
            f"{column} is null",
            f"`{column}` is not null",
            *(["b", "not b"] if column == "b" else []),
        ]
    )


def random_rows(rng: random.Random, rows: int, spread: int = 9) -> pa.Table:
    """`spread` small: rows of few different values, so that statistics decide more often."""
    columns = {}
    for field in SCHEMA:
        some = rng.sample(VALUES[field.name], min(spread, len(VALUES[field.name])))
        nulls = rng.choice([0.0, 0.3, 1.0]) if spread < 9 else 0.3
        columns[field.name] = [None if rng.random() < nulls else rng.choice(some) for _ in range(rows)]
    return pa.table(columns, schema=SCHEMA)


def test_a_filter_passes_the_rows_that_spark_passes(spark: SparkSession, tmp_path) -> None:
    rng = random.Random(11)
    table = random_rows(rng, 300)
    path = tmp_path / "rows.parquet"
    pq.write_table(table.append_column("n", pa.array(range(table.num_rows))), path)
    filters = [random_filter(rng) for _ in range(250)]

    frame = spark.read.parquet(str(path))
    counts = frame.selectExpr(*(f"count_if({text}) as c{n}" for n, text in enumerate(filters))).first()

    assert counts is not None
    for text, expected in zip(filters, counts, strict=True):
        node = where.parse(text, SCHEMA, "t")
        assert table.filter(node.expression()).num_rows == expected, text


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_statistics_never_exclude_a_row_that_passes_nor_promise_one_that_does_not(tmp_path_factory, seed) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "where.parquet"
    parts = [random_rows(rng, rng.choice([1, 2, 5]), spread=rng.choice([1, 2])) for _ in range(4)]
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for part in parts:
            writer.write_table(part)
    text = random_filter(rng)
    expected = [part.filter(where.parse(text, SCHEMA, "t").expression()).num_rows for part in parts]
    try:
        groups = open_table(path).where(text).snapshot().row_groups
    except TableError as error:
        assert "matches no rows" in error.message
        assert sum(expected) == 0
    else:
        assert groups.index.tolist() == [i for i, rows in enumerate(expected) if rows]
        assert groups.rows.tolist() == [rows for rows in expected if rows]
        assert groups.stored_rows.tolist() == [parts[i].num_rows for i in groups.index]


def test_a_row_whose_comparison_is_null_passes_neither_a_filter_nor_its_negation() -> None:
    table = pa.table({"x": [1, None, 3]})
    for text in ("x = 1", "x in (1)", "x between 0 and 2"):
        for whole in (text, f"not ({text})"):
            passed = table.filter(where.parse(whole, table.schema, "t").expression())
            assert passed.num_rows == 1, whole
    assert table.filter(where.parse("x = 1 or x is null", table.schema, "t").expression()).num_rows == 2


def test_long_lists_and_long_chains_are_no_problem() -> None:
    table = pa.table({"x": [1, 5, 30_000, None]})
    many = f"x in ({', '.join(map(str, range(20_000)))})"
    assert table.filter(where.parse(many, table.schema, "t").expression()).num_rows == 2
    chain = " or ".join(f"x = {n}" for n in range(2_000))
    assert table.filter(where.parse(chain, table.schema, "t").expression()).num_rows == 2


def test_names_ignore_case_as_in_spark_and_take_back_quotes() -> None:
    schema = pa.schema([("Origin", pa.string()), ("a b", pa.int64())])
    assert where.parse("ORIGIN = 'x' and `a b` = 1", schema, "t").columns() == {"Origin", "a b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("orign = 'JFK'", ["'orign'", "at character 1", "Did you mean 'origin'?"]),
        ("day = '2013-06-01' and zzz = 1", ["'zzz'", "at character 24", "Columns: origin, day, n, ns"]),
        ("n = ", ["Write for example"]),
        ("n >= 1 1", ["character"]),
        ("", ["Write for example"]),
        ("n like 1", ["LIKE is not part of the filter language"]),
        ("n <=> 1", ["is not part of the filter language"]),
        ("n + 1 = 2", ["'n + 1'", "a column's name is expected"]),
        ("n = day", ["a value is expected"]),
        ("n in (select 1)", ["IN needs a list of values"]),
        ("n in (1, null)", ["use IS NULL"]),
        ("n = null", ["use IS NULL"]),
        ("n", ["not boolean"]),
        ("n = 'many'", ["'n' has type int64", "'many'"]),
        ("n = 99999999999999999999", ["'n' has type int64"]),
        ("day = 'yesterday'", ["'day' has type date32", "'yesterday'"]),
        ("ns < '9999-01-01'", ["'ns' has type timestamp[ns]", "'9999-01-01'"]),
        ("origin = 5", ["'origin' has type string"]),
        ("n = 1; drop table t", ["is not part of the filter language"]),
        ("(" * 3000 + "n = 1" + ")" * 3000, ["nested too deeply"]),
    ],
)
def test_a_wrong_filter_is_refused_with_what_is_wrong_and_a_way_out(text: str, words: list[str]) -> None:
    schema = pa.schema([("origin", pa.string()), ("day", pa.date32()), ("n", pa.int64()), ("ns", pa.timestamp("ns"))])
    with pytest.raises(TableError) as caught:
        where.parse(text, schema, "lake/flights")
    message = str(caught.value)
    assert "lake/flights" in message and caught.value.fix
    assert [word for word in words if word not in message] == [], message
