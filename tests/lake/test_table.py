"""Opening and pinning: which files are a table, what their columns are, what the filter leaves."""

from __future__ import annotations

import datetime
import os
import shutil
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs

from dl_on_spark.errors import TableError
from dl_on_spark.lake import RowGroupDecoder, Snapshot, open_table

DAY = datetime.date(2013, 6, 1)


def write(path: Path, columns: object, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def rows_of(snapshot: Snapshot) -> list[dict]:
    with RowGroupDecoder(snapshot) as decoder:
        return [row for i in range(snapshot.num_row_groups) for row in decoder.decode(i).to_pylist()]


def refusal(table) -> str:
    with pytest.raises(TableError) as caught:
        table.snapshot()
    assert caught.value.fix
    return str(caught.value)


@pytest.fixture
def days(tmp_path) -> Path:
    """Three days of two hours, two rows each; x counts up."""
    root = tmp_path / "the lake" / "flights"
    for n in range(6):
        folder = root / f"date=2013-06-0{n // 2 + 1}" / f"hour={n % 2 + 5}"
        write(folder / "part-0.parquet", {"x": [2 * n, 2 * n + 1]})
    return root


@pytest.mark.parametrize("as_uri", [str, lambda path: path.as_uri(), lambda path: f"{path}/"])
def test_folder_names_give_typed_columns_after_those_of_the_files(days, as_uri) -> None:
    snapshot = open_table(as_uri(days)).snapshot()
    assert snapshot.schema == pa.schema([("x", pa.int64()), ("date", pa.date32()), ("hour", pa.int32())])
    assert snapshot.rows == 12
    assert rows_of(snapshot)[3] == {"x": 3, "date": DAY, "hour": 6}
    assert open_table(days).schema == snapshot.schema


def test_types_of_folders_are_decided_over_all_values_whatever_the_filter(tmp_path) -> None:
    for value in ("1", "2", "a b", "c=d", "__HIVE_DEFAULT_PARTITION__", "%2F%20"):
        write(tmp_path / f"key={value}" / "part.parquet", {"x": [1]})
    table = open_table(tmp_path)
    assert {row["key"] for row in rows_of(table.snapshot())} == {"1", "2", "a b", "c=d", None, "/ "}
    assert rows_of(table.where("key = '1'").snapshot()) == [{"x": 1, "key": "1"}]
    assert rows_of(table.where("key = 'c=d'").snapshot()) == [{"x": 1, "key": "c=d"}]
    assert rows_of(table.where("key is null").snapshot()) == [{"x": 1, "key": None}]


def test_numbers_beyond_32_bits_and_dates_that_do_not_exist_keep_their_values(tmp_path) -> None:
    write(tmp_path / "n=3000000000" / "d=2013-02-30" / "a.parquet", {"x": [1]})
    write(tmp_path / "n=-1" / "d=2013-02-28" / "a.parquet", {"x": [1]})
    schema = open_table(tmp_path).schema
    assert schema.field("n").type == pa.int64()
    assert schema.field("d").type == pa.string()


def test_hidden_files_and_folders_are_no_part_of_a_table(days) -> None:
    before = open_table(days).snapshot()
    (days / "_SUCCESS").touch()
    (days / ".part.crc").write_bytes(b"x")
    for folder in ("_temporary/0", "_staging/1/new/date=2013-06-09/hour=5", ".hidden", "date=2013-06-01/_tmp"):
        write(days / folder / "part-1.parquet", {"other": [1]})
    assert open_table(days).snapshot().fingerprint == before.fingerprint


def test_one_file_is_a_table(tmp_path) -> None:
    path = write(tmp_path / "key=1" / "rows.parquet", {"x": [1, 2]})
    snapshot = open_table(path).snapshot()
    assert (snapshot.rows, snapshot.files[0].path, snapshot.schema.names) == (2, "", ["x"])
    assert rows_of(snapshot) == [{"x": 1}, {"x": 2}]


def test_only_files_of_matching_partitions_are_opened(days) -> None:
    for path in (days / "date=2013-06-01").rglob("*.parquet"):
        path.write_bytes(b"not opened")
    table = open_table(days)
    assert table.where("date > '2013-06-01' and hour = 5").snapshot().rows == 4
    assert table.where("date > '2013-06-01' and x < 6").snapshot().rows == 2
    assert table.where("not (date = '2013-06-01' or hour in (6))").where("x = 9").schema.names == ["x", "date", "hour"]
    assert "date=2013-06-01/hour=5/part-0.parquet" in refusal(table.where("x = 1"))


def test_files_and_row_groups_without_rows_are_left_out(tmp_path) -> None:
    empty = pa.table({"x": pa.array([], pa.int64())})
    write(tmp_path / "a.parquet", empty)
    with pq.ParquetWriter(tmp_path / "b.parquet", empty.schema) as writer:
        for part in (empty, pa.table({"x": [1, 2]}), empty, pa.table({"x": [3]})):
            writer.write_table(part)
    snapshot = open_table(tmp_path).snapshot()
    assert snapshot.row_groups.rows.tolist() == [2, 1]
    assert [row["x"] for row in rows_of(snapshot)] == [1, 2, 3]


def test_a_table_without_rows_and_a_filter_without_rows_are_refused_by_name(tmp_path, days) -> None:
    write(tmp_path / "e" / "a.parquet", pa.table({"x": pa.array([], pa.int64())}))
    assert f"{tmp_path / 'e'} has no rows" in refusal(open_table(tmp_path / "e"))
    (tmp_path / "nothing").mkdir()
    assert "holds no data files" in refusal(open_table(tmp_path / "nothing"))
    assert "there is no table" in refusal(open_table(tmp_path / "absent"))
    for text in ("date = '2014-01-01'", "x = 100", "x = 1 and x = 2", "date = '2013-06-02' and x = 1"):
        message = refusal(open_table(days).where(text))
        assert text in message and str(days) in message and "matches no rows" in message
    assert "no column 'y'" in refusal(open_table(days).where("date = '2014-01-01' and y = 1"))


def test_rows_are_counted_under_the_filter_where_statistics_leave_it_open(tmp_path) -> None:
    write(tmp_path / "a.parquet", {"x": list(range(12)), "s": ["a", "b"] * 6}, row_group_size=4)
    table = open_table(tmp_path).where("x >= 2").where("x < 10 or s = 'z'").select(["s"])
    snapshot = table.snapshot()
    assert snapshot.row_groups.rows.tolist() == [2, 4, 2]
    assert snapshot.row_groups.stored_rows.tolist() == [4, 4, 4]
    assert (snapshot.rows, snapshot.where) == (8, "(x >= 2) and (x < 10 or s = 'z')")
    assert [row["s"] for row in rows_of(snapshot)] == ["a", "b"] * 4


@pytest.mark.parametrize("text", ["c = 'b'", "c in ('b')", "c >= 'b'"])
def test_dictionary_columns_can_be_filtered(tmp_path, text) -> None:
    write(tmp_path / "a.parquet", {"c": pa.array(["a", "b", None]).dictionary_encode()})
    assert rows_of(open_table(tmp_path).where(text).snapshot()) == [{"c": "b"}]


def test_old_timestamps_of_spark_without_statistics_can_be_filtered(tmp_path) -> None:
    moments = [datetime.datetime(2013, 6, day) for day in (1, 2)]
    write(tmp_path / "a.parquet", {"at": moments}, use_deprecated_int96_timestamps=True)
    assert open_table(tmp_path).where("at > '2013-06-01'").snapshot().rows == 1


def test_timestamps_keep_their_values_whatever_their_storage(spark, tmp_path) -> None:
    far = [datetime.datetime(year, 1, 2, 3, 4, 5, 678901) for year in (1, 1500, 2013, 9999)]
    column = pa.array([*far, None], pa.timestamp("us"))
    lists = pa.array([[moment] for moment in far] + [None], pa.list_(pa.timestamp("us")))
    structs = pa.array([{"at": moment, "n": 1} for moment in far] + [None])
    nested = {"t": column, "list": lists, "struct": structs}
    write(tmp_path / "us.parquet", nested)
    write(tmp_path / "int96.parquet", nested, use_deprecated_int96_timestamps=True)
    spark.read.parquet(str(tmp_path / "us.parquet")).write.option("compression", "none").parquet(
        str(tmp_path / "by spark"), mode="overwrite"
    )
    for name in ("us.parquet", "int96.parquet", "by spark"):
        table = open_table(tmp_path / name)
        found = rows_of(table.snapshot())
        assert [row["t"] for row in found] == [*far, None], name
        assert [row["list"] for row in found] == [*([moment] for moment in far), None], name
        assert [row["struct"]["at"] for row in found[:4]] == far, name
        assert rows_of(table.where("t >= '9999-01-02 03:04:05.678901'").select(["t"]).snapshot()) == [{"t": far[-1]}]
    near = pa.array([1_370_044_800_000_000_001], pa.timestamp("ns"))
    write(tmp_path / "ns.parquet", {"t": near})
    with RowGroupDecoder(open_table(tmp_path / "ns.parquet").snapshot()) as decoder:
        assert decoder.decode(0)["t"].combine_chunks() == near


def test_instants_that_spark_stores_as_int96_are_those_it_reads(spark, tmp_path) -> None:
    frame = spark.sql("select timestamp'9999-12-31 23:59:59.5Z' at union all select timestamp'1600-01-01 00:00:00Z'")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    try:
        frame.coalesce(1).write.parquet(str(tmp_path / "t"))
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    (path,) = (tmp_path / "t").glob("*.parquet")
    assert pq.read_metadata(path).schema.column(0).physical_type == "INT96"
    expected = {datetime.datetime(9999, 12, 31, 23, 59, 59, 500000), datetime.datetime(1600, 1, 1)}
    assert {row["at"] for row in rows_of(open_table(tmp_path / "t").snapshot())} == expected


def test_decimals_and_nulls_keep_value_and_type_in_every_row_group(tmp_path) -> None:
    money = [Decimal("12345678901234.5678"), None, Decimal("-0.0001"), None]
    whole = [1, 2, None, None]
    columns = {"money": pa.array(money, pa.decimal128(18, 4)), "n": pa.array(whole, pa.int32())}
    write(tmp_path / "t.parquet", columns, row_group_size=1)
    snapshot = open_table(tmp_path / "t.parquet").snapshot()
    with RowGroupDecoder(snapshot) as decoder:
        parts = [decoder.decode(i) for i in range(snapshot.num_row_groups)]
    assert {str(part.schema) for part in parts} == {str(snapshot.schema)}
    assert pa.concat_tables(parts).to_pydict() == {"money": money, "n": whole}
    assert rows_of(open_table(tmp_path / "t.parquet").where("money < 0").select(["money"]).snapshot()) == [
        {"money": Decimal("-0.0001")}
    ]


def test_selected_columns_come_in_the_order_asked_for(days) -> None:
    snapshot = open_table(days).select(["hour", "x"]).where("date = '2013-06-01' and x = 3").snapshot()
    assert snapshot.schema.names == ["hour", "x"]
    assert rows_of(snapshot) == [{"hour": 6, "x": 3}]
    assert rows_of(open_table(days).select(["date"]).where("x = 3").snapshot()) == [{"date": DAY}]
    assert "Did you mean 'hour'" in refusal(open_table(days).select(["houre"]))


def test_columns_in_another_order_and_of_a_narrower_type_are_read_as_one(tmp_path) -> None:
    write(tmp_path / "a.parquet", {"x": pa.array([1], pa.int32()), "y": pa.array([0.5], pa.float32())})
    write(tmp_path / "b.parquet", {"y": pa.array([0.25], pa.float64()), "x": pa.array([2**40], pa.int64())})
    snapshot = open_table(tmp_path).snapshot()
    assert snapshot.schema == pa.schema([("x", pa.int64()), ("y", pa.float64())])
    assert rows_of(snapshot) == [{"x": 1, "y": 0.5}, {"x": 2**40, "y": 0.25}]
    assert rows_of(open_table(tmp_path).where("x > 1").snapshot()) == [{"x": 2**40, "y": 0.25}]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"x": ["text"], "y": [1]}, ["'x'", "int64", "string"]),
        ({"x": pa.array([1.0]), "y": [1]}, ["'x'", "int64", "double"]),
        ({"x": [1]}, ["'y'"]),
        ({"x": [1], "y": [1], "z": [1]}, ["'z'"]),
    ],
)
def test_files_that_do_not_fit_each_other_are_both_named(tmp_path, other, words) -> None:
    write(tmp_path / "a.parquet", {"x": [1], "y": [1]})
    write(tmp_path / "b.parquet", {"y": [2], "x": [2]})
    write(tmp_path / "c.parquet", other)
    message = refusal(open_table(tmp_path))
    assert "c.parquet" in message and ("a.parquet" in message or "b.parquet" in message)
    assert all(word in message for word in words)


def test_files_below_different_folders_are_refused(tmp_path) -> None:
    write(tmp_path / "k=1" / "a.parquet", {"x": [1]})
    write(tmp_path / "b.parquet", {"x": [1]})
    assert "b.parquet has []" in refusal(open_table(tmp_path)) or "k=1/a.parquet has ['k']" in refusal(
        open_table(tmp_path)
    )
    write(tmp_path / "t" / "x=1" / "a.parquet", {"x": [1]})
    assert "'x' is in the files and in the folders" in refusal(open_table(tmp_path / "t"))


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    good = write(tmp_path / "t" / "a.parquet", {"x": list(range(1000))}).read_bytes()
    bad = tmp_path / "t" / "b.parquet"
    for content in (b"", b"PAR1", good[:-1], good[: len(good) // 2], b"x" * 100, good[:-8] + b"\xff\xff\xff\x7fPAR1"):
        bad.write_bytes(content)
        assert "b.parquet is not a complete Parquet file" in refusal(open_table(tmp_path / "t"))
    bad.write_bytes(good[:-60] + bytes(52) + good[-8:])
    assert "b.parquet cannot be read" in refusal(open_table(tmp_path / "t"))
    bad.write_bytes(good[:-4] + b"PARE")
    assert "b.parquet has an encrypted footer" in refusal(open_table(tmp_path / "t"))


def test_versions_and_formats_that_are_not_there_are_refused(days) -> None:
    assert "has no versions" in refusal(open_table(days, version=3))
    with pytest.raises(TableError, match="unknown table format 'orc'") as caught:
        open_table(days, format="orc")
    assert "parquet" in (caught.value.fix or "")


def test_a_file_system_of_pyarrow_that_is_not_local_works_the_same(days, monkeypatch) -> None:
    from dl_on_spark.lake import row_groups, storage, table

    remote = pafs.SubTreeFileSystem(str(days.parent), pafs.LocalFileSystem())
    place = storage.Location("s3://bucket/flights", remote, "flights")
    monkeypatch.setattr(table, "locate", lambda _: place)
    monkeypatch.setattr(row_groups, "locate", lambda _: place)
    snapshot = open_table("s3://bucket/flights").where("date >= '2013-06-02' and x != 5").snapshot()
    assert [row["x"] for row in rows_of(snapshot)] == [4, 6, 7, 8, 9, 10, 11]


def test_a_snapshot_survives_json(days) -> None:
    snapshot = open_table(days).where("x > 2").select(["date", "x"]).snapshot()
    again = Snapshot.from_json(snapshot.to_json())
    assert again.fingerprint == snapshot.fingerprint
    assert (again.uri, again.files, again.schema, again.where) == (
        snapshot.uri,
        snapshot.files,
        snapshot.schema,
        snapshot.where,
    )
    for name in ("file", "index", "rows", "stored_rows", "bytes"):
        np.testing.assert_array_equal(getattr(again.row_groups, name), getattr(snapshot.row_groups, name))
    assert rows_of(again) == rows_of(snapshot)


def test_a_fingerprint_tells_data_filter_and_columns_and_nothing_else(days, tmp_path) -> None:
    table = open_table(days)
    known = table.snapshot().fingerprint
    moved = shutil.copytree(days, tmp_path / "elsewhere")
    for path in moved.rglob("*.parquet"):
        os.utime(path, (1, 1))
    assert open_table(moved).snapshot().fingerprint == known
    others = {
        table.where("x >= 0").snapshot().fingerprint,
        table.select(["x"]).snapshot().fingerprint,
        table.select(["x", "date"]).snapshot().fingerprint,
        table.where("date >= '2013-06-02'").snapshot().fingerprint,
    }
    path = moved / "date=2013-06-01" / "hour=5" / "part-0.parquet"
    size = path.stat().st_size
    write(path, {"x": [0, 2]})  # as many rows and bytes as before
    assert path.stat().st_size == size
    others.add(open_table(moved).snapshot().fingerprint)
    path.rename(moved / "date=2013-06-02" / "hour=5" / "part-1.parquet")
    others.add(open_table(moved).snapshot().fingerprint)
    assert len(others | {known}) == 7


def test_a_day_that_the_filter_leaves_out_does_not_change_the_fingerprint(days) -> None:
    table = open_table(days).where("date <= '2013-06-02' and x > 0")
    known = table.snapshot().fingerprint
    write(days / "date=2013-06-07" / "hour=5" / "part-0.parquet", {"x": [1]})
    assert table.snapshot().fingerprint == known
