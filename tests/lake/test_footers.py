"""Footers: small whatever the table's size, and read by Spark's executors when there are many files."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake.formats import footers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WHERE = "date > '2024-01-01' and (x > 0.5 or moment >= '2024-01-01 00:00:05') and name = 'b'"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    for day in (1, 2, 3):
        folder = tmp_path / f"date=2024-01-0{day}"
        folder.mkdir()
        for number in range(3):
            columns = {
                "x": draw.random(30),
                "name": draw.choice(["a", "b"], 30),
                "moment": [datetime.datetime(2024, 1, 1, 0, 0, i % 9) for i in range(30)],
            }
            pq.write_table(
                pa.table(columns),
                folder / f"part-{number}.parquet",
                row_group_size=7,
                use_deprecated_int96_timestamps=True,
            )
    return tmp_path


@pytest.mark.parametrize("where", [None, WHERE])
def test_executors_find_what_the_driver_finds(
    spark: SparkSession, table: Path, where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = open_table(table) if where is None else open_table(table).where(where)
    here = chosen.snapshot(spark)
    monkeypatch.setattr(footers, "MANY_FILES", 2)
    monkeypatch.setattr(footers, "_read", None)  # this process reads none
    there = chosen.snapshot(spark)
    assert there.to_json() == here.to_json() and there.fingerprint == here.fingerprint


def test_a_file_that_an_executor_cannot_read_is_named_as_the_driver_names_it(
    spark: SparkSession, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (table / "date=2024-01-02" / "torn.parquet").write_bytes(b"PAR1 not all of it")
    monkeypatch.setattr(footers, "MANY_FILES", 2)
    with pytest.raises(TableError, match=r"date=2024-01-02/torn\.parquet is not a complete Parquet file") as told:
        open_table(table).snapshot(spark)
    assert "Write it again" in (told.value.fix or "")


def test_planning_hundred_thousand_row_groups_keeps_little_of_their_footers(tmp_path: Path) -> None:
    pq.write_table(pa.table({f"c{i}": np.zeros(2_000) for i in range(8)}), tmp_path / "one.parquet", row_group_size=10)
    folder = tmp_path / "table"
    folder.mkdir()
    for number in range(500):
        os.link(tmp_path / "one.parquet", folder / f"part-{number:03d}.parquet")
    script = f"""
import resource
from dl_on_spark.input_pipeline import SamplePlan, open_table
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
snapshot = open_table({str(folder)!r}).snapshot()
plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=8, global_batch_size=8192, seed=1)
rows = sum(stream.rows for stream in plan.streams(0))
print(snapshot.num_row_groups, rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    groups, rows, megabytes = map(int, done.stdout.split())
    assert (groups, rows) == (100_000, 1_000_000)
    assert megabytes < 120  # kept whole, the footers alone would be five times as much
