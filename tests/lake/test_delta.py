"""Delta tables: the version asked for, its files, types, partition values and deleted rows, as deltalake reads them."""

from __future__ import annotations

import builtins
import datetime
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dl_on_spark.errors import TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import RowGroupDecoder, Snapshot
from tests.lake import delta_log

ODD = ["a b", "x/y=1", "é%20", None]


def rows_of(snapshot: Snapshot) -> pa.Table:
    with RowGroupDecoder(Snapshot.from_json(snapshot.to_json())) as decoder:
        return pa.concat_tables([decoder.decode(i) for i in range(snapshot.num_row_groups)])


def ids_of(uri: Path, **options: Any) -> list[int]:
    where = options.pop("where", None)
    table = open_table(uri, **options)
    snapshot = (table if where is None else table.where(where)).snapshot()
    assert snapshot.format == "delta"
    found: list[int] = rows_of(snapshot).column("id").to_pylist()
    assert len(found) == snapshot.rows
    return sorted(found)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    uri = tmp_path / "my table"
    first = pa.table(
        {
            "id": np.arange(8),
            "day": pa.array([1, 2] * 4, pa.date32()),
            "place": [ODD[i % 4] for i in range(8)],
            "x": pa.array([i / 2 for i in range(8)], pa.float32()),
        }
    )
    write_deltalake(uri, first, partition_by=["day", "place"])
    second = first.set_column(0, "id", pa.array(np.arange(8, 16))).append_column("new", pa.array(["n"] * 8))
    write_deltalake(uri, second, mode="append", schema_mode="merge", partition_by=["day", "place"])
    return uri


def test_all_values_are_those_that_deltalake_reads(table: Path) -> None:
    snapshot = open_table(table).snapshot()
    assert (snapshot.format, snapshot.version, snapshot.rows) == ("delta", "1", 16)
    ours = rows_of(snapshot)
    theirs = DeltaTable(table).to_pyarrow_table().select(ours.column_names)
    key = [("id", "ascending")]
    assert ours.sort_by(key).to_pylist() == theirs.sort_by(key).to_pylist()
    assert ours.schema.field("day").type == pa.date32()


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("day = '1970-01-02'", [0, 2, 4, 6, 8, 10, 12, 14]),
        ("place = 'x/y=1' and id < 8", [1, 5]),
        ("place is null", [3, 7, 11, 15]),
        ("new is null and id >= 6", [6, 7]),
        ("new = 'n' and place = 'a b'", [8, 12]),
        ("x > 3", [7, 15]),
    ],
)
def test_filters_prune_by_partitions_and_by_the_logs_statistics(table: Path, where: str, ids: list[int]) -> None:
    assert ids_of(table, where=where) == ids
    found = open_table(table).where("id >= 100 or id = 3").snapshot()
    assert [file.partition["place"] for file in found.files] == [None]


def test_a_version_is_a_number_or_a_time(table: Path) -> None:
    assert ids_of(table, version=0) == list(range(8))
    assert "new" not in open_table(table, version=0).schema.names
    between = datetime.datetime.now(datetime.UTC)
    time.sleep(0.02)  # commits are told apart by milliseconds
    more = pa.table({"id": [99], "day": pa.array([1], pa.date32()), "place": ["z"]})
    write_deltalake(table, more, mode="append", schema_mode="merge")
    assert ids_of(table, version=between.isoformat()) == list(range(16))
    assert ids_of(table)[-1] == 99
    for version in ("7", "1999-01-01T00:00:00Z"):
        with pytest.raises(TableError, match=f"has no version '{version}'"):
            open_table(table, version=version).snapshot()
    with pytest.raises(TableError, match="'soon' is no number and no time"):
        open_table(table, version="soon").snapshot()


def test_a_checkpoint_stands_for_the_log_before_it_and_the_fingerprint_stays(table: Path) -> None:
    before = open_table(table).snapshot().fingerprint
    DeltaTable(table).create_checkpoint()
    for file in (table / "_delta_log").glob("*.json"):
        file.unlink()
    assert ids_of(table) == list(range(16))
    assert open_table(table).snapshot().fingerprint == before


def test_a_file_that_was_vacuumed_is_named(table: Path) -> None:
    DeltaTable(table).delete("id < 8")
    assert ids_of(table) == list(range(8, 16))
    DeltaTable(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(TableError, match=r"\.parquet is not there any more") as told:
        open_table(table, version=1).snapshot()
    assert "VACUUM" in (told.value.fix or "")


def test_an_emptied_table_and_a_missing_package_are_told(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DeltaTable(table).delete()
    with pytest.raises(TableError, match="has no rows"):
        open_table(table).snapshot()
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("deltalake"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TableError, match="deltalake is not installed") as told:
        open_table(table).snapshot()
    assert "dl_on_spark[delta]" in (told.value.fix or "")


@pytest.mark.parametrize("kept_in", ["log", "file"])
def test_rows_of_deletion_vectors_are_gone(tmp_path: Path, kept_in: str) -> None:
    rows = pa.table({"id": np.arange(11)})  # row groups of 4, 4 and 3 rows
    gone = [0, 4, 5, 6, 7, 9]
    root = tmp_path / "my t"
    root.mkdir()
    vector = delta_log.inline_vector(gone) if kept_in == "log" else delta_log.vector_file(root, gone)
    actions = delta_log.table_actions([delta_log.field("id", "long")], [], ["deletionVectors"])
    whole = delta_log.add(root, "b.parquet", pa.table({"id": [50]}), {})
    delta_log.commit(root, 0, [*actions, delta_log.add(root, "a b.parquet", rows, {}, vector), whole])
    left = [1, 2, 3, 8, 10, 50]
    assert ids_of(root) == left
    snapshot = open_table(root).snapshot()
    assert snapshot.num_row_groups == 3  # the second has no rows left
    assert snapshot.row_groups.rows.tolist() == [3, 2, 1]
    assert ids_of(root, where="id >= 3 and id != 8") == [3, 10, 50]
    assert sorted(i for batch in open_table(root).batches(2, seed=3) for i in batch["id"].tolist()) == left
    delta_log.commit(root, 1, [{"remove": {"path": "b.parquet", "dataChange": True, "deletionTimestamp": 1}}])
    assert open_table(root).snapshot().fingerprint != snapshot.fingerprint


def test_mapped_columns_are_read_by_their_physical_names(tmp_path: Path) -> None:
    point = {"type": "struct", "fields": [delta_log.field("lat", "double", "col-5", 5)]}
    fields = [
        delta_log.field("id", "long", "col-1", 1),
        delta_log.field("x", "double", "col-2", 2),
        delta_log.field("old name", "double", "x", 3),  # a dropped column's name, taken again
        delta_log.field("point", point, "col-4", 4),
        delta_log.field("day", "date", "col-6", 6),
    ]
    files = []
    for day, first in (("2024-01-01", 0), ("2024-01-02", 10)):
        ids = np.arange(first, first + 5)
        columns = {"col-1": ids, "x": ids + 0.5, "col-4": [{"col-5": float(i)} for i in ids]}
        if first:
            columns["col-2"] = ids * 2.0
        files.append(delta_log.add(tmp_path, f"{day}.parquet", pa.table(columns), {"col-6": day}))
    delta_log.commit(tmp_path, 0, [*delta_log.table_actions(fields, ["day"], ["columnMapping"]), *files])
    found = rows_of(open_table(tmp_path).select(["id", "x", "old name", "point.lat", "day"]).snapshot()).to_pylist()
    assert [row["id"] for row in found] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    for row in found:
        assert row["old name"] == row["id"] + 0.5 and row["point.lat"] == row["id"]
        assert row["x"] == (None if row["id"] < 10 else row["id"] * 2.0)
        assert row["day"] == datetime.date(2024, 1, 1 if row["id"] < 10 else 2)
    assert ids_of(tmp_path, where="x is null") == [0, 1, 2, 3, 4]
    assert ids_of(tmp_path, where="x >= 22 and day > '2024-01-01'") == [11, 12, 13, 14]
    assert ids_of(tmp_path, where="`old name` = 3.5 or point.lat = 12") == [3, 12]
