"""Spark writes days: the same rows give the same bytes, other days stay, a killed write changes nothing."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import InputError
from dl_on_spark.lake import RowGroupDecoder, open_table
from dl_on_spark.lake.writes import write_partitions
from tests.cluster import spark_environment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAYS = [datetime.date(2013, 6, day) for day in (1, 2, 3)]


def rows(spark: SparkSession, days: list[datetime.date], count: int = 40, seed: int = 0) -> DataFrame:
    """`count` rows of each day in an order that depends on `seed`; every fourth key twice."""
    data = [(day, i // 4 * 3 + i % 4, f"v{i}", None if i % 5 else i / 3) for day in days for i in range(count)]
    turned = data[seed:] + data[:seed]
    return spark.createDataFrame(turned, "date date, id long, name string, half double").repartition(1 + seed % 3)


def digests(root: Path) -> dict[str, str]:
    paths = (path for path in root.rglob("*.parquet") if "_staging" not in path.parts)
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def ids(root: Path, text: str) -> list[int]:
    snapshot = open_table(root).where(text).snapshot()
    with RowGroupDecoder(snapshot, ["id"]) as decoder:
        return [x for i in range(snapshot.num_row_groups) for x in decoder.decode(i)["id"].to_pylist()]


def test_a_day_written_again_is_the_same_bytes_in_files_of_known_names(spark, tmp_path) -> None:
    root = tmp_path / "my lake #1 50%20" / "a:b"
    options = {"partition_by": "date", "sort_by": ["id"], "rows_per_file": 16, "rows_per_group": 8}
    report = write_partitions(rows(spark, DAYS), root, **options)
    assert len(list(tmp_path.iterdir())) == 1
    first = digests(root)
    assert sorted(first) == [f"date={day}/part-{n:05d}.parquet" for day in DAYS for n in range(3)]
    assert (report.rows, report.files) == (120, 9)
    assert report.bytes == sum(path.stat().st_size for path in root.rglob("date=*/*.parquet"))
    assert [partition.name for partition in report.partitions] == [f"date={day}" for day in DAYS]
    footer = pq.read_metadata(root / "date=2013-06-01" / "part-00000.parquet")
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [8, 8]
    # By their numbers in parquet.thrift: Spark's own order changes from one JVM to the next.
    numbers = {"PLAIN": 0, "PLAIN_DICTIONARY": 2, "RLE": 3, "BIT_PACKED": 4, "RLE_DICTIONARY": 8}
    for column in range(footer.num_columns):
        encodings = [numbers[name] for name in footer.row_group(0).column(column).encodings]
        assert encodings == sorted(encodings)
    assert ids(root, "date = '2013-06-02'") == sorted(ids(root, "date = '2013-06-02'"))

    again = write_partitions(rows(spark, DAYS[:2], seed=7), root, **options)
    assert digests(root) == first
    assert again.partitions == report.partitions[:2]


def test_other_days_stay_and_a_day_without_rows_any_more_goes(spark, tmp_path) -> None:
    write_partitions(rows(spark, DAYS), tmp_path, partition_by="date")
    before = digests(tmp_path)
    write_partitions(rows(spark, DAYS[1:2], count=4), tmp_path, partition_by="date", replaces=DAYS[1:])
    after = digests(tmp_path)
    assert sorted({path.partition("/")[0] for path in after}) == ["date=2013-06-01", "date=2013-06-02"]
    assert {k: v for k, v in after.items() if DAYS[0].isoformat() in k} == {
        k: v for k, v in before.items() if DAYS[0].isoformat() in k
    }
    assert len(ids(tmp_path, "date = '2013-06-02'")) == 4


def test_values_with_odd_letters_are_written_read_and_withdrawn(spark, tmp_path) -> None:
    odd = ["a b", "c=d", "x/y:z", "50%", "é'", None]
    frame = spark.createDataFrame(
        [(key, n, i) for i in range(30) for n, key in enumerate(odd)], "k string, n int, i int"
    )
    options = {"partition_by": "k`y", "sort_by": ["n`"], "rows_per_file": 7}
    frame = frame.withColumnsRenamed({"k": "k`y", "n": "n`"})
    write_partitions(frame, tmp_path, **options)
    first = digests(tmp_path)
    snapshot = open_table(tmp_path).snapshot()
    with RowGroupDecoder(snapshot) as decoder:
        found = [row for i in range(snapshot.num_row_groups) for row in decoder.decode(i).to_pylist()]
    assert {(row["k`y"], row["n`"]) for row in found} == {(key, n) for n, key in enumerate(odd)}
    assert len(found) == 30 * len(odd)
    write_partitions(frame.orderBy("i"), tmp_path, **options)
    assert digests(tmp_path) == first
    write_partitions(frame.where("`n``` = 0"), tmp_path, **options, replaces=odd)
    assert [path.name for path in tmp_path.iterdir() if path.name != "_staging"] == ["k`y=a b"]


def test_a_write_that_fails_in_spark_leaves_the_table_as_it_was(spark, tmp_path) -> None:
    from pyspark.sql import functions as F

    write_partitions(rows(spark, DAYS), tmp_path, partition_by="date")
    before = digests(tmp_path)
    bad = rows(spark, DAYS).withColumn("half", F.raise_error(F.lit("no")).cast("double"))
    with pytest.raises(Exception, match="no"):
        write_partitions(bad, tmp_path, partition_by="date")
    assert digests(tmp_path) == before
    assert [path.name for path in (tmp_path / "_staging").iterdir()] == ["gate"]


def test_what_cannot_be_written_is_refused_before_anything_is_done(spark, tmp_path) -> None:
    frame = rows(spark, DAYS)
    with pytest.raises(InputError, match="no column 'day'"):
        write_partitions(frame, tmp_path / "t", partition_by="day")
    with pytest.raises(InputError, match="no column 'key'"):
        write_partitions(frame, tmp_path / "t", partition_by="date", sort_by=["key"])
    with pytest.raises(InputError, match="s3://bucket/t: partitions are replaced by rename"):
        write_partitions(frame, "s3://bucket/t", partition_by="date")
    assert not (tmp_path / "t").exists()


@pytest.mark.faults
def test_a_spark_writer_that_is_killed_leaves_the_old_day_and_the_next_write_tidies_up(spark, tmp_path) -> None:
    write_partitions(rows(spark, DAYS[:1]), tmp_path, partition_by="date", sort_by=["id"])
    before = digests(tmp_path)
    command = [sys.executable, "-m", "tests.lake.killed_spark_writer", str(tmp_path)]
    writer = subprocess.Popen(command, env=spark_environment(), start_new_session=True)
    try:
        assert writer.wait(timeout=120) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(writer.pid, signal.SIGKILL)  # its JVM
    assert digests(tmp_path) == before
    assert len(list((tmp_path / "_staging").iterdir())) == 2  # the gate and what it left behind

    write_partitions(rows(spark, DAYS[1:2]), tmp_path, partition_by="date", sort_by=["id"])
    assert len(list((tmp_path / "_staging").iterdir())) == 1
    assert {name: digest for name, digest in digests(tmp_path).items() if name in before} == before
