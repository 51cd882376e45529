"""The flights' ETL: bad rows set aside with reasons, re-runs alike, and nothing of the future in a feature."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import examples.flight_delay
from dl_on_spark.config import load_config
from dl_on_spark.errors import DataContractError
from dl_on_spark.jobs import etl
from dl_on_spark.lake import open_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = datetime.date(2013, 6, 1)
PIPELINE = Path(examples.flight_delay.__file__).with_name("pipeline.yaml")
FLIGHTS = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,"
    "origin,dest,air_time,distance,hour,minute,time_hour"
)


def _flights(
    count: int, *, late: str = "20", times: tuple[str, str, str, str] = ("905", "5", "1105", "100")
) -> list[str]:
    departed, delay, arrived, air = times
    return [
        f"2013,6,1,{departed},900,{delay},{arrived},1100,{late},UA,{number},N1,EWR,ORD,{air},719,9,0,2013-06-01T13:00:00Z"
        for number in range(1, count + 1)
    ]


def _run(spark: SparkSession, lake: Path, flights: list[str]) -> dict[str, Any]:
    def write(name: str, *lines: str) -> None:
        (lake / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (lake / "raw" / name).write_text("\n".join(lines) + "\n")

    write(f"flights/date={DAY}/flights.csv", FLIGHTS, *flights)
    write(
        f"weather/date={DAY}/weather.csv",
        "origin,time_hour,temp,humid,wind_speed,precip,visib",
        "EWR,2013-06-01T12:00:00Z,70,50,5,0,10",
        "EWR,2013-06-01T13:00:00Z,99,99,99,0,1",
    )
    write("planes/planes.csv", "tailnum,year,seats", "N1,2003,150")
    return etl.run(spark, load_config(PIPELINE, [f"lake={lake}"]), DAY)


def _rows(lake: Path) -> list[dict[str, Any]]:
    batches = open_table(lake / "tables" / "flight_features").snapshot()
    from dl_on_spark.lake import RowGroupDecoder

    with RowGroupDecoder(batches) as decoder:
        return [row for i in range(batches.num_row_groups) for row in decoder.decode(i).to_pylist()]


def test_weather_is_that_of_the_hour_before_departure(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, _flights(1))
    (row,) = _rows(tmp_path)
    assert (row["temperature"], row["plane_age"], row["sched_duration"], row["delayed"]) == (70.0, 10.0, 120.0, 1)


def test_no_feature_depends_on_what_happened_after_the_schedule(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path / "a", _flights(3))
    _run(spark, tmp_path / "b", _flights(3, times=("1500", "360", "1700", "")))
    _run(spark, tmp_path / "c", _flights(3, late="-9", times=("", "", "", "")))
    for other in ("b", "c"):
        for row, changed in zip(_rows(tmp_path / "a"), _rows(tmp_path / other), strict=True):
            assert changed | {"delayed": 1} == row
            assert changed["delayed"] == (1 if other == "b" else 0)


def test_flights_without_an_arrival_have_no_label_and_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, [*_flights(2), *_flights(3, late="")[2:]])
    assert len(_rows(tmp_path)) == 2


def test_bad_rows_go_to_quarantine_with_reasons_and_a_rerun_leaves_the_same_bytes(
    spark: SparkSession, tmp_path: Path
) -> None:
    bad = _flights(1)[0].replace(",EWR,", ",XXX,").replace(",719,", ",far,")

    def digests() -> dict[str, str]:
        files = sorted((tmp_path / "tables").rglob("*.parquet"))
        return {str(f.relative_to(tmp_path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}

    first = _run(spark, tmp_path, [*_flights(40), bad])
    before = digests()
    assert (first["rows"], first["rejected"]) == (40, 1)
    (row,) = spark.read.parquet(str(tmp_path / "tables" / "quarantine" / "flights")).collect()
    assert set(row.reasons) == {"origin: not one of EWR, JFK, LGA", "distance: not double"}
    assert row.source_file.endswith("flights.csv")
    assert row.date == DAY
    _run(spark, tmp_path, [*_flights(40), bad])
    assert digests() == before


def test_too_many_bad_rows_stop_the_night_and_leave_the_day_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, _flights(5))
    with pytest.raises(DataContractError, match="origin: not one of"):
        _run(spark, tmp_path, [row.replace(",EWR,", ",XXX,") for row in _flights(5)])
    assert len(_rows(tmp_path)) == 5
