"""Partitions change in one step: killed, failing and concurrent writers leave an old or a new one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import TableError
from dl_on_spark.lake import RowGroupDecoder, open_table, staging
from tests.cluster import spark_environment
from tests.lake.killed_writer import FILES, ROWS, replace

POINTS = {
    "writing": 1,
    "written": 1,
    "before-exchange": 1,
    "after-exchange": 2,
    "set-aside": 1,
    "published": 2,
    "cleaning": 2,
}


def start(root: Path, value: int, point: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.lake.killed_writer", str(root), str(value), point]
    return subprocess.Popen(command, env=spark_environment(), stdout=subprocess.PIPE, text=True)


def values(root: Path) -> list[int]:
    """All cells of the table, as a reader of ours sees them."""
    snapshot = open_table(root).snapshot()
    with RowGroupDecoder(snapshot, ["x"]) as decoder:
        return [x for i in range(snapshot.num_row_groups) for x in decoder.decode(i)["x"].to_pylist()]


def staged(root: Path) -> list[str]:
    return [path.name for path in (root / "_staging").iterdir() if path.is_dir()]


@pytest.mark.faults
@pytest.mark.parametrize("point", POINTS)
def test_a_writer_killed_at_any_point_leaves_the_old_day_or_the_new_one(tmp_path, point) -> None:
    replace(tmp_path, 1)
    writer = start(tmp_path, 2, point)
    assert writer.wait(timeout=60) == -signal.SIGKILL
    assert values(tmp_path) == [POINTS[point]] * FILES * ROWS
    if point != "set-aside":  # between two renames, where the system cannot exchange, only we see the old day
        assert pq.read_table(tmp_path)["x"].to_pylist() == [POINTS[point]] * FILES * ROWS
    assert len(staged(tmp_path)) == 1

    with staging.staging(tmp_path):  # the next writer, of any day, tidies up
        assert (tmp_path / "date=2013-06-01").is_dir()
        assert values(tmp_path) == [POINTS[point]] * FILES * ROWS
        assert len(staged(tmp_path)) == 1
    assert staged(tmp_path) == []


@pytest.mark.faults
def test_a_first_write_that_is_killed_leaves_no_partition(tmp_path) -> None:
    assert start(tmp_path, 1, "written").wait(timeout=60) == -signal.SIGKILL
    with pytest.raises(TableError, match="no data files"):
        open_table(tmp_path).snapshot()
    replace(tmp_path, 2)
    assert values(tmp_path) == [2] * FILES * ROWS


@pytest.mark.faults
def test_writers_killed_at_random_leave_whole_days(tmp_path) -> None:
    replace(tmp_path, 0)
    for round_ in range(1, 5):
        writer = start(tmp_path, 1000 * round_, "random")
        assert writer.stdout is not None
        # It is somewhere after its last report when the signal comes: where, differs from run to run.
        last = [int(writer.stdout.readline()) for _ in range(3 * round_)][-1]
        writer.kill()
        last = max([last, *map(int, writer.stdout.read().split())])
        writer.wait(timeout=60)
        writer.stdout.close()
        found = values(tmp_path)
        assert len(found) == FILES * ROWS
        assert found[0] in {last, last + 1}
        assert set(found) == {found[0]}


def test_a_failing_write_leaves_the_old_day_and_no_trace(tmp_path, monkeypatch) -> None:
    replace(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), staging.staging(tmp_path) as new:
        (new.new / "date=2013-06-01").mkdir(parents=True)
        raise ZeroDivisionError
    assert (values(tmp_path), staged(tmp_path)) == ([1] * FILES * ROWS, [])

    monkeypatch.setattr(staging, "_exchange", lambda *_: False)
    with pytest.raises(OSError), staging.staging(tmp_path) as new:
        (new.new / "date=2013-06-01").mkdir(parents=True)
        move = staging._move

        def broken(folder: Path, target: Path) -> None:
            move(folder, target)
            new.new.joinpath("date=2013-06-01").rmdir()  # the second rename finds nothing

        monkeypatch.setattr(staging, "_move", broken)
        new.commit(["date=2013-06-01"])
    assert (tmp_path / "date=2013-06-01").is_dir()
    assert (values(tmp_path), staged(tmp_path)) == ([1] * FILES * ROWS, [])


def test_the_folder_of_a_living_writer_is_left_alone(tmp_path) -> None:
    with staging.staging(tmp_path) as slow:
        (slow.new / "date=2013-06-01").mkdir(parents=True)
        replace(tmp_path, 5)
        assert (slow.new / "date=2013-06-01").is_dir()
    assert values(tmp_path) == [5] * FILES * ROWS


@pytest.mark.parametrize("exchange", [True, False])
def test_concurrent_writers_of_a_day_never_mix(tmp_path, monkeypatch, exchange) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda *_: False)
    together = threading.Barrier(4)

    def write(value: int) -> None:
        together.wait(timeout=30)
        for _ in range(5):
            replace(tmp_path, value)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = values(tmp_path)
    assert len(found) == FILES * ROWS
    assert len(set(found)) == 1
    assert staged(tmp_path) == []


def test_concurrent_writers_of_different_days_keep_both(tmp_path) -> None:
    together = threading.Barrier(3)

    def write(value: int) -> None:
        together.wait(timeout=30)
        for _ in range(5):
            replace(tmp_path, value, f"date=2013-06-0{value}")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, (1, 2, 3)))
    assert values(tmp_path) == [value for value in (1, 2, 3) for _ in range(FILES * ROWS)]
    assert staged(tmp_path) == []


@pytest.mark.faults
def test_a_writer_that_holds_the_gate_too_long_is_named_with_the_way_out(tmp_path, monkeypatch) -> None:
    replace(tmp_path, 1)
    monkeypatch.setattr(staging, "_GATE_DEADLINE_S", 0.1)
    with (
        staging._gate(tmp_path),
        pytest.raises(TableError, match="another writer") as caught,
        staging.staging(tmp_path),
    ):
        pass
    assert "fuser" in (caught.value.fix or "")
    assert values(tmp_path) == [1] * FILES * ROWS
