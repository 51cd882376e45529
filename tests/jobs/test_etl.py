"""The flights' ETL: bad rows set aside with reasons, re-runs alike, and nothing half-written."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import examples.flight_delay
from dl_on_spark.config import PipelineConfig, load_config
from dl_on_spark.errors import DataContractError, SchemaError, TableError
from dl_on_spark.jobs import etl
from dl_on_spark.jobs.days import DaySplit
from dl_on_spark.lake import open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAY = datetime.date(2013, 6, 1)
NEXT_DAY = datetime.date(2013, 6, 2)
PIPELINE = Path(examples.flight_delay.__file__).with_name("pipeline.yaml")
FLIGHTS = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,"
    "origin,dest,air_time,distance,hour,minute,time_hour"
)


def _flights(count: int, *, late: str = "20") -> list[str]:
    return [
        f"2013,6,1,905,900,5,1105,1100,{late},UA,{number},N1,EWR,ORD,100,719,9,0,2013-06-01T13:00:00Z"
        for number in range(1, count + 1)
    ]


def _write(lake: Path, name: str, *lines: str) -> None:
    (lake / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
    (lake / "raw" / name).write_text("\n".join(lines) + "\n")


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.parquet"))
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _job(spark: SparkSession, lake: Path, date: datetime.date, **options: Any) -> dict[str, Any]:
    return etl.run(spark, load_config(PIPELINE, [f"lake={lake}"]), date, quiet=True, **options)


def _run(spark: SparkSession, lake: Path, flights: list[str]) -> dict[str, Any]:
    _write(lake, f"flights/date={DAY}/flights.csv", FLIGHTS, *flights)
    _write(
        lake,
        f"weather/date={DAY}/weather.csv",
        "origin,time_hour,temp,humid,wind_speed,precip,visib,pressure",
        "EWR,2013-06-01T12:00:00Z,70,50,5,0,10,1013",
        "EWR,2013-06-01T13:00:00Z,99,99,99,0,1,990",
    )
    _write(lake, "planes/planes.csv", "tailnum,year,seats", "N1,2003,150")
    return _job(spark, lake, DAY)


def _rows(lake: Path) -> list[dict[str, Any]]:
    batches = open_table(lake / "tables" / "flight_features").snapshot()
    from dl_on_spark.lake import RowGroupDecoder

    with RowGroupDecoder(batches) as decoder:
        return [row for i in range(batches.num_row_groups) for row in decoder.decode(i).to_pylist()]


def test_weather_is_that_of_the_hour_before_departure(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, _flights(1))
    (row,) = _rows(tmp_path)
    assert (row["temperature"], row["plane_age"], row["sched_duration"], row["delayed"]) == (70.0, 10.0, 120.0, 1)


def test_flights_without_an_arrival_have_no_label_and_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, [*_flights(2), *_flights(3, late="")[2:]])
    assert len(_rows(tmp_path)) == 2


def test_bad_rows_go_to_quarantine_with_reasons_and_a_rerun_leaves_the_same_bytes(
    spark: SparkSession, tmp_path: Path
) -> None:
    bad = _flights(1)[0].replace(",EWR,", ",XXX,").replace(",719,", ",far,")

    first = _run(spark, tmp_path, [*_flights(40), bad])
    before = _digests(tmp_path / "tables")
    assert (first["rows"], first["rejected"]) == (40, 1)
    (row,) = spark.read.parquet(str(tmp_path / "tables" / "quarantine" / "flights")).collect()
    assert set(row.reasons) == {"origin: not one of EWR, JFK, LGA", "distance: not double"}
    assert row.source_file.endswith("flights.csv")
    assert row.date == DAY
    _run(spark, tmp_path, [*_flights(40), bad])
    assert _digests(tmp_path / "tables") == before


def test_too_many_bad_rows_stop_the_night_and_leave_the_day_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, _flights(5))
    with pytest.raises(DataContractError, match="origin: not one of"):
        _run(spark, tmp_path, [row.replace(",EWR,", ",XXX,") for row in _flights(5)])
    assert len(_rows(tmp_path)) == 5


def test_a_range_is_refused_whole_when_one_day_breaks_the_labels_checks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    from examples.flight_delay import transform

    _run(spark, tmp_path, _flights(5))
    before = _digests(tmp_path / "tables")
    _write(tmp_path, f"flights/date={NEXT_DAY}/flights.csv", FLIGHTS, *_flights(3))
    whole = transform.flight_features

    def wrong_label(*given: Any) -> DataFrame:
        label = F.when(F.col("date") == F.lit(NEXT_DAY), 7).otherwise(F.col("delayed"))
        return whole(*given).withColumn("delayed", label)

    monkeypatch.setattr(transform, "flight_features", wrong_label)
    with pytest.raises(DataContractError, match=r"flight_features: 3 of 8 rows .*delayed: not one of 0, 1 \(3\)"):
        _job(spark, tmp_path, NEXT_DAY, start_date=DAY)
    assert _digests(tmp_path / "tables") == before
    assert not (tmp_path / "tables" / "flight_features" / f"date={NEXT_DAY}").exists()


def test_an_error_in_the_transform_is_shown_where_it_is(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.flight_delay import transform

    def broken(*_: Any) -> DataFrame:
        raise ZeroDivisionError("in my transform")

    monkeypatch.setattr(transform, "flight_features", broken)
    line = broken.__code__.co_firstlineno + 1
    said = rf"raised ZeroDivisionError: in my transform \(.*test_etl\.py, line {line}\)"
    with pytest.raises(TableError, match=said) as caught:
        _run(spark, tmp_path, _flights(2))
    assert caught.value.exit_code == 2 and isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not (tmp_path / "tables").exists()


def test_a_day_whose_files_are_missing_keeps_what_was_written_and_is_reported(
    spark: SparkSession, tmp_path: Path
) -> None:
    _run(spark, tmp_path, _flights(2))
    _write(tmp_path, f"flights/date={NEXT_DAY}/flights.csv", FLIGHTS, *_flights(3))
    before = _digests(tmp_path / "tables" / "flight_features" / f"date={DAY}")
    shutil.rmtree(tmp_path / "raw" / "flights" / f"date={DAY}")
    report = _job(spark, tmp_path, NEXT_DAY, start_date=DAY)
    assert report["missing"] == {"flights": [str(DAY)], "weather": [str(NEXT_DAY)]}
    assert (report["days"], report["rows"]) == (1, 3)
    assert _digests(tmp_path / "tables" / "flight_features" / f"date={DAY}") == before
    with pytest.raises(TableError, match=f"source 'flights': no files for {DAY}"):
        _job(spark, tmp_path, DAY)


def test_text_that_is_no_value_is_a_reason_and_never_an_error_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    good = _flights(60)
    odd = [
        good[0].replace("UA,1,", "UA,99999999999,"),
        good[0].replace(",719,", ",1e400x,"),
        good[0].replace("2013-06-01T13:00:00Z", "yesterday"),
    ]
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    report = _run(spark, tmp_path, [*good, *odd])
    (flights,) = (check for check in report["checks"] if check["name"] == "flights")
    assert flights["reasons"] == {"flight: not int": 1, "distance: not double": 1, "time_hour: not timestamp": 1}
    assert report["rows"] == 60


def _with_transform(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The flights' transform, and `change` of its rows."""
    from examples.flight_delay import transform

    whole = transform.flight_features
    monkeypatch.setattr(transform, "flight_features", lambda *given: change(whole(*given)))


def test_rows_of_another_day_are_refused_since_they_would_replace_that_day(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions as F

    _run(spark, tmp_path, _flights(3))
    before = _digests(tmp_path / "tables")
    _with_transform(monkeypatch, lambda rows: rows.withColumn("date", F.date_add("date", 1)))
    with pytest.raises(TableError, match=f"rows of date={NEXT_DAY} in a run for {DAY} to {DAY}"):
        _run(spark, tmp_path, _flights(2))
    assert _digests(tmp_path / "tables") == before


def test_a_transform_that_does_not_fit_its_sources_is_named_without_java(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_transform(monkeypatch, lambda rows: rows.select("gate"))
    with pytest.raises(TableError, match=r"the transform .* does not fit its sources: .*`gate`") as caught:
        _run(spark, tmp_path, _flights(2))
    assert "\n" not in caught.value.message and "SQLSTATE" not in caught.value.message
    monkeypatch.undo()
    _with_transform(monkeypatch, lambda rows: None)
    with pytest.raises(TableError, match="returned NoneType, not a DataFrame"):
        _run(spark, tmp_path, _flights(2))
    assert not (tmp_path / "tables").exists()


def test_a_day_whose_header_lacks_a_column_is_named_and_not_read_as_nulls(spark: SparkSession, tmp_path: Path) -> None:
    _run(spark, tmp_path, _flights(2))
    before = _digests(tmp_path / "tables")
    rows = [row.replace(",20,UA", ",UA") for row in _flights(3)]
    _write(tmp_path, f"flights/date={NEXT_DAY}/flights.csv", FLIGHTS.replace(",arr_delay", ""), *rows)
    with pytest.raises(SchemaError, match=rf"'flights': date={NEXT_DAY}/flights\.csv has no column 'arr_delay'"):
        _job(spark, tmp_path, NEXT_DAY, start_date=DAY)
    assert _digests(tmp_path / "tables") == before


def test_a_quarantine_that_cannot_be_written_is_refused_before_the_table_changes(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "quarantine").write_text("a file")
    with pytest.raises(TableError, match="quarantine is a file, not a folder"):
        _run(spark, tmp_path, _flights(2))
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["quarantine"]


def test_names_with_spaces_dots_and_quotes_go_through_etl_filters_and_days(spark: SparkSession, tmp_path: Path) -> None:
    names = ["a b", "x.y", "it`s", "größe", 'say "hi"']
    fields = "".join(f"  {json.dumps(name)}: {{type: int, checks: {{min: 1}}}}\n" for name in names)
    (tmp_path / "s.yaml").write_text(f"name: odd\nfields:\n{fields}  the day: {{type: date, role: partition}}\n")
    header = ",".join('"' + name.replace('"', '""') + '"' for name in (*names, "the day"))
    _write(tmp_path, "rows.csv", header, "1,2,3,4,5,2013-06-01", "0,2,3,4,5,2013-06-01")
    settings: dict[str, Any] = {
        "name": "odd",
        "lake": str(tmp_path),
        "schema": str(tmp_path / "s.yaml"),
        "date_column": "the day",
        "etl": {
            "transform": "m:f",
            "sources": {"rows": {"path": "raw", "schema": str(tmp_path / "s.yaml")}},
            "max_rejected": 0.5,
        },
        "training": {"model": "m:f", "days": 1, "holdout_days": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(etl, "load_function", lambda _: lambda spark, sources, first, last: sources["rows"])
        report = etl.run(spark, PipelineConfig.model_validate(settings), DAY, quiet=True)
    assert (report["rows"], report["rejected"]) == (1, 1)
    day = DaySplit.of(PipelineConfig.model_validate(settings), DAY).holdout_filter("the day")
    table = open_table(tmp_path / "tables" / "features").where(day).where("`x.y` = 2 and `it``s` = 3")
    assert table.snapshot().rows == 1
