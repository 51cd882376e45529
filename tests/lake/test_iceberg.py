"""Iceberg tables: snapshots, columns by field id, hidden partitions and deleted rows, as pyiceberg reads them."""

from __future__ import annotations

import builtins
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable, Table
from pyiceberg.transforms import BucketTransform, DayTransform
from pyiceberg.types import DoubleType, LongType, StringType
from pyiceberg.utils.config import Config

from dl_on_spark.errors import TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import RowGroupDecoder, Snapshot
from tests.lake import iceberg_deletes

START = datetime.datetime(2024, 1, 1)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqlCatalog:
    settings = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/ware house"}
    (tmp_path / "ware house").mkdir()
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
    for name, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # read once, at import
    made = SqlCatalog("lake", **settings)
    made.create_namespace("db")
    return made


def rows(first: int, last: int) -> pa.Table:
    ids = np.arange(first, last)
    return pa.table(
        {
            "id": pa.array(ids, pa.int32()),
            "x": pa.array(ids / 2, pa.float32()),
            "moment": [START + datetime.timedelta(days=int(i)) for i in ids],
            "place": [{"lat": float(i), "name": f"n{i}"} for i in ids],
            "word": pa.array([None if i % 3 == 0 else f"w{i}" for i in ids], pa.string()),
        }
    )


@pytest.fixture
def table(catalog: SqlCatalog) -> Table:
    made = catalog.create_table("db.t", schema=rows(0, 1).schema)
    made.append(rows(0, 6))
    made.append(rows(6, 12))
    return made


def folder(table: Table) -> str:
    return table.location().removeprefix("file://")


def read(snapshot: Snapshot) -> pa.Table:
    with RowGroupDecoder(Snapshot.from_json(snapshot.to_json())) as decoder:
        found = pa.concat_tables([decoder.decode(i) for i in range(snapshot.num_row_groups)])
    assert found.num_rows == snapshot.rows and snapshot.format == "iceberg"
    return found


def ids(uri: str, where: str | None = None, **options: Any) -> list[int]:
    chosen = open_table(uri, **options)
    found: list[int] = read((chosen if where is None else chosen.where(where)).snapshot()).column("id").to_pylist()
    return sorted(found)


def test_folder_metadata_file_and_catalog_are_one_table(table: Table) -> None:
    ways = [folder(table), table.metadata_location, "iceberg://lake/db.t"]
    found = [open_table(way).snapshot() for way in ways]
    assert {snapshot.fingerprint for snapshot in found} == {found[0].fingerprint}
    current = table.current_snapshot()
    assert current is not None and found[0].version == str(current.snapshot_id)
    theirs = table.scan().to_arrow().sort_by("id").to_pylist()
    for snapshot in found:
        assert read(snapshot).sort_by("id").to_pylist() == theirs
    assert found[0].schema.field("word").type == pa.string()


def test_a_schema_that_changed_is_followed_by_field_ids(table: Table) -> None:
    with table.update_schema() as change:
        change.update_column("x", DoubleType())
        change.rename_column("x", "half")
        change.update_column("id", LongType())
        change.rename_column("place.lat", "latitude")
    with table.update_schema() as change:
        change.add_column("x", StringType())  # the old name, another column
        change.move_first("word")
    more = rows(12, 14).rename_columns(["id", "half", "moment", "place", "word"])
    place = pa.array([{"latitude": float(i), "name": f"n{i}"} for i in (12, 13)])
    more = more.set_column(3, "place", place).append_column("x", pa.array(["new", "new"]))
    more = more.set_column(0, "id", more["id"].cast(pa.int64())).set_column(1, "half", more["half"].cast(pa.float64()))
    table.append(more.select(["word", "id", "half", "moment", "place", "x"]))
    names = ["word", "id", "half", "place.latitude", "x"]
    found = read(open_table(folder(table)).select(names).snapshot()).sort_by("id").to_pylist()
    for row in found:
        number = row["id"]
        assert row["half"] == number / 2 and row["place.latitude"] == number
        assert row["x"] == ("new" if number >= 12 else None)
    assert len(found) == 14
    assert ids(folder(table), "x is null and half >= 5") == [10, 11]
    assert ids(folder(table), "x = 'new'") == [12, 13]
    assert ids(folder(table), "place.latitude = 3 or half = 6.5") == [3, 13]
    first = next(iter(table.snapshots()))
    assert open_table(folder(table), version=first.snapshot_id).schema.names[1] == "x"
    assert ids(folder(table), "x > 1", version=first.snapshot_id) == [3, 4, 5]


def test_a_version_is_an_id_a_tag_a_branch_or_a_time(table: Table) -> None:
    first, second = table.snapshots()
    table.manage_snapshots().create_tag(first.snapshot_id, "before").commit()
    uri = "iceberg://lake/db.t"
    for version in (first.snapshot_id, str(first.snapshot_id), "before"):
        assert ids(uri, version=version) == list(range(6))
    at = datetime.datetime.fromtimestamp(first.timestamp_ms / 1000, datetime.UTC)
    assert ids(uri, version=at.isoformat()) == list(range(6))
    assert ids(uri, version="2100-01-01") == ids(uri, version="main") == list(range(12))
    for version in ("5", "1999-01-01", "soon"):
        with pytest.raises(TableError, match=rf"has no snapshot '{version}' .*{second.snapshot_id}"):
            open_table(uri, version=version).snapshot()


def test_hidden_partitions_prune_files(catalog: SqlCatalog) -> None:
    made = catalog.create_table("db.p", schema=rows(0, 1).schema)
    with made.update_spec() as spec:
        spec.add_field("moment", DayTransform(), "day")
        spec.add_field("id", BucketTransform(2), "bucket")
    made.append(rows(0, 10))
    everything = open_table(folder(made)).snapshot()
    assert len(everything.files) == 10
    few = open_table(folder(made)).where("moment >= '2024-01-09'").snapshot()
    assert len(few.files) == 2 and sorted(read(few).column("id").to_pylist()) == [8, 9]
    assert len(open_table(folder(made)).where("id = 4").snapshot().files) == 1
    for filter, expected in (
        ("not (moment < '2024-01-08' or id = 8)", [7, 9]),
        ("word is not null and x > 3", [7, 8]),
        ("id in (1, 2) and not (x <= 0.5)", [2]),
        ("word is null or id between 3 and 5", [0, 3, 4, 5, 6, 9]),
    ):
        assert ids(folder(made), filter) == expected


def test_nan_is_not_pruned_where_spark_finds_it(catalog: SqlCatalog) -> None:
    data = pa.table({"id": [1, 2, 3], "x": [float("nan"), 1.0, 2.0]})
    made = catalog.create_table("db.n", schema=data.schema)
    made.append(data)
    assert ids(folder(made), "x > 5") == [1]
    assert ids(folder(made), "not (x <= 1)") == [1, 3]


def test_deleted_positions_are_gone(table: Table) -> None:
    files = sorted(task.file.file_path for task in table.scan().plan_files())
    metadata = iceberg_deletes.delete_positions(table, [(files[0], 0), (files[0], 5), (files[1], 2)])
    theirs = StaticTable.from_metadata(str(metadata)).scan().to_arrow().column("id").to_pylist()
    assert len(theirs) == 9
    before = open_table(table.metadata_location).snapshot().fingerprint
    for uri in (str(metadata), folder(table)):
        assert ids(uri) == sorted(theirs)
        assert ids(uri, "id > 3") == sorted(i for i in theirs if i > 3)
        assert open_table(uri).snapshot().fingerprint != before


def test_equality_deletes_are_refused(table: Table) -> None:
    metadata = iceberg_deletes.delete_equal(table, "id", [3])
    with pytest.raises(TableError, match="has equality deletes") as told:
        open_table(str(metadata)).snapshot()
    assert "rewrite_data_files" in (told.value.fix or "")


def test_what_is_not_there_is_told(table: Table, catalog: SqlCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = catalog.create_table("db.empty", schema=rows(0, 1).schema)
    with pytest.raises(TableError, match="has no rows"):
        open_table(folder(empty)).snapshot()
    for uri, text in (("iceberg://lake/db.none", "does not give this table"), ("iceberg://lake", "names no table")):
        with pytest.raises(TableError, match=text):
            open_table(uri).snapshot()
    (file, _) = sorted(task.file.file_path for task in table.scan().plan_files())
    Path(file.removeprefix("file://")).unlink()
    with pytest.raises(TableError, match=r"\.parquet is not there any more") as told:
        open_table(folder(table)).snapshot()
    assert "expiry of snapshots" in (told.value.fix or "")
    Path(table.metadata_location.removeprefix("file://")).write_text("{}")
    with pytest.raises(TableError, match="no Iceberg metadata that can be read"):
        open_table(folder(table)).snapshot()
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyiceberg"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TableError, match="pyiceberg is not installed"):
        open_table(folder(table)).snapshot()
