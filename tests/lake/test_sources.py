"""Raw sources: the files of some days, whatever the order of their columns and the letters in their paths."""

from __future__ import annotations

import datetime
import gzip
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dl_on_spark.errors import TableError
from dl_on_spark.lake.sources import Source, missing_days, read_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST, LAST = datetime.date(2013, 6, 2), datetime.date(2013, 6, 4)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Four of five days; the columns come in two orders, and one file has one more."""
    root = tmp_path / "raw [1] {x} 50% *"
    for day, text in {1: "a,b\n1,x1\n", 2: "b,a\nx2,2\n", 4: "a,b,c\n4,x4,new\n", 5: "a,b\n5,x5\n"}.items():
        folder = root / f"date=2013-06-0{day}"
        folder.mkdir(parents=True)
        (folder / "part 1.csv").write_text(text)
        (folder / ".part 1.csv.crc").write_text("no data")
    (root / "_SUCCESS").touch()
    return root


def test_columns_are_matched_by_name_and_days_by_folder(spark: SparkSession, raw: Path) -> None:
    source = Source("flights", str(raw), partition="date")
    rows = {row.a: row for row in read_source(spark, source, FIRST, LAST).collect()}
    assert {key: (row.b, row.c, row.date) for key, row in rows.items()} == {
        "2": ("x2", None, FIRST),
        "4": ("x4", "new", LAST),
    }
    assert "date=2013-06-02" in rows["2"].source_file
    assert missing_days(source, FIRST, LAST) == [datetime.date(2013, 6, 3)]


def test_days_before_the_first_are_read_when_asked_for(spark: SparkSession, raw: Path) -> None:
    source = Source("weather", str(raw), partition="date", lookback_days=1)
    assert sorted(row.a for row in read_source(spark, source, FIRST, LAST).collect()) == ["1", "2", "4"]
    assert sorted(row.a for row in read_source(spark, Source("all", str(raw)), FIRST, LAST).collect()) == list("1245")
    assert missing_days(Source("all", str(raw)), FIRST, LAST) == []


def test_a_source_without_files_or_header_is_named(spark: SparkSession, raw: Path) -> None:
    source = Source("flights", str(raw), partition="date")
    third = datetime.date(2013, 6, 3)
    with pytest.raises(TableError, match="source 'flights': no files for 2013-06-03 to 2013-06-03") as caught:
        read_source(spark, source, third, third)
    assert "upstream" in (caught.value.fix or "")
    with pytest.raises(TableError, match="source 'gone': no files"):
        read_source(spark, Source("gone", str(raw / "gone")), third, third)
    (raw / "date=2013-06-04" / "empty.csv").write_text("\n")
    with pytest.raises(TableError, match=r"date=2013-06-04/empty\.csv has no header line"):
        read_source(spark, source, FIRST, LAST)


def test_a_day_of_a_header_alone_has_no_rows_and_is_there(spark: SparkSession, raw: Path) -> None:
    (raw / "date=2013-06-03").mkdir()
    (raw / "date=2013-06-03" / "part 1.csv").write_text("a,b\n")
    source = Source("flights", str(raw), partition="date")
    third = datetime.date(2013, 6, 3)
    assert read_source(spark, source, third, third).count() == 0
    assert missing_days(source, FIRST, LAST) == []


def test_rows_that_do_not_fit_their_header_are_marked_with_their_text(spark: SparkSession, tmp_path: Path) -> None:
    text = 'a,b\n1,x\n2,y,lost\n3\n"say ""no"", twice",z\n,\n'
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = read_source(spark, Source("s", str(tmp_path)), FIRST, LAST).collect()
    assert [(row.a, row._corrupt_record) for row in rows] == [
        ("1", None),
        ("2", "2,y,lost"),
        ("3", "3"),
        ('say "no", twice', None),
        (None, None),
    ]
    # A column alone is enough to see it: Spark must not leave out the others while it counts.
    alone = read_source(spark, Source("s", str(tmp_path)), FIRST, LAST).where("_corrupt_record is not null")
    assert sorted(row.a for row in alone.select("a").collect()) == ["2", "3"]


def test_a_header_with_a_name_twice_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,A\n1,2,3\n")
    with pytest.raises(TableError, match=r"header of t\.csv names column 'a' twice"):
        read_source(spark, Source("s", str(tmp_path)), FIRST, LAST)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("cut.csv.gz", gzip.compress(b"a,b\n" * 9)[:-12], r"cut\.csv\.gz cannot be read"),
        ("odd.csv", b"PAR1\x00\x93\xfe\n", r"odd\.csv is no CSV"),
        ("latin.csv", "größe,b\n".encode("latin-1"), r"latin\.csv is no CSV"),
    ],
)
def test_a_file_that_is_no_text_is_named(spark: SparkSession, raw: Path, name: str, data: bytes, said: str) -> None:
    (raw / "date=2013-06-04" / name).write_bytes(data)
    with pytest.raises(TableError, match=f"source 'flights': date=2013-06-04/{said}"):
        read_source(spark, Source("flights", str(raw), partition="date"), FIRST, LAST)
