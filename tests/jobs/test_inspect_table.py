"""`table inspect` tells what a table holds, what can be fed and how it splits, before anything is launched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dl_on_spark.cli import app
from dl_on_spark.errors import TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.jobs.inspect_table import inspect
from dl_on_spark.lake import Schema
from dl_on_spark.lake.ddl import VECTOR


@pytest.fixture
def uri(tmp_path: Path) -> str:
    for day, rows in (("2024-01-01", 70), ("2024-01-02", 33)):
        folder = tmp_path / f"date={day}"
        folder.mkdir()
        columns = {
            "id": np.arange(rows),
            "half": np.zeros(rows, np.float16),
            "pair": pa.array([[1.0, 2.0]] * rows, pa.list_(pa.float32(), 2)),
            "tokens": pa.array([["a"]] * rows),
            "place": pa.array([{"x": 1.0}] * rows),
            "features": pa.array([{"type": 1, "values": [1.0]}] * rows, VECTOR),
            "tags": pa.array([[("k", 1)]] * rows, pa.map_(pa.string(), pa.int32())),
        }
        pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=20)
    return str(tmp_path)


def test_facts_are_those_of_the_snapshot_and_shares_add_up(uri: str) -> None:
    found = inspect(uri, num_workers=3, global_batch_size=10)
    snapshot = open_table(uri).snapshot()
    assert (found.rows, found.files, found.row_groups) == (103, 2, 6)
    assert (found.fingerprint, found.bytes) == (snapshot.fingerprint, snapshot.bytes)
    assert found.rows_per_row_group == (10, 20, 20) and found.partitions == {"date": 2}
    assert sum(share.rows for share in found.shares) == 103
    assert max(share.rows for share in found.shares) - min(share.rows for share in found.shares) <= 3
    assert 6 <= sum(share.row_groups for share in found.shares) <= 8
    assert found.steps_per_epoch == 10  # the three rows left over are folded into the last step


def test_each_column_says_how_it_is_fed_or_what_it_needs(uri: str) -> None:
    columns = {column.name: column for column in inspect(uri).columns}
    assert {name: column.fed for name, column in columns.items() if column.fed} == {
        "id": "int64 []",
        "half": "float32 []",
        "pair": "float32 [2]",
        "date": "int32 []",
    }
    assert columns["tokens"].needs == "type: array<string> and its shape, and pad: VALUE where lengths differ"
    assert columns["place"].needs == "its fields by dotted names"
    assert columns["features"].needs == "type: vector and shape: [size]"
    assert "map<string, int32" in columns["tags"].needs and "has no tensor" in columns["tags"].needs
    schema = Schema.from_dict({"name": "t", "fields": {"id": {"type": "bigint", "role": "key"}}})
    assert inspect(uri, schema=schema).columns[0].fed == "int64 [] (key)"


def test_what_will_be_slow_is_advised(uri: str) -> None:
    advice = inspect(uri, where="id = 5 or id = 65", num_workers=2).advice
    assert any("row groups for" not in line and "do not pass the filter" in line for line in advice)
    assert any("2 row groups for 4 workers" in line for line in inspect(uri, where="id < 9", num_workers=4).advice)


def test_the_command_prints_tables_or_json(uri: str) -> None:
    run = CliRunner().invoke(app, ["table", "inspect", uri, "--workers", "2", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rows"] == 103
    shown = CliRunner().invoke(app, ["table", "inspect", uri, "--where", "date = '2024-01-02'"])
    assert shown.exit_code == 0 and "Split over 2 workers" in shown.output
    gone = CliRunner().invoke(app, ["table", "inspect", uri + "/gone"])
    assert isinstance(gone.exception, TableError) and "there is no table" in str(gone.exception)
