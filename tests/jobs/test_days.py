"""Which days are trained on and which are held out: no day in both, none between them."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.cli import _day
from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import ConfigError, TableError
from dl_on_spark.jobs.days import DaySplit, run_folder, warn_of_days
from dl_on_spark.lake import open_table
from tests.registry.saved_models import write_day

ONE_DAY = datetime.timedelta(days=1)


def _config(days: int = 2, holdout_days: int = 1, lake: str = "/lake", sync: str = "allreduce") -> PipelineConfig:
    training = {"model": "m:f", "days": days, "holdout_days": holdout_days, "sync": sync}
    etl = {"transform": "m:f", "sources": {}}
    return PipelineConfig.model_validate(
        {"name": "clicks", "lake": lake, "schema": "s.yaml", "etl": etl, "training": training}
    )


@given(st.dates(datetime.date(2000, 1, 1)), st.integers(1, 400), st.integers(1, 60))
def test_held_out_days_end_at_the_date_and_follow_the_training_days(
    date: datetime.date, days: int, holdout_days: int
) -> None:
    split = DaySplit.of(_config(days, holdout_days), date)
    assert split.holdout_last == date
    assert split.holdout_first - split.last == ONE_DAY
    assert (split.holdout_last - split.holdout_first).days + 1 == holdout_days
    assert (split.last - split.first).days + 1 == days


def test_a_leap_day_counts() -> None:
    split = DaySplit.of(_config(days=2, holdout_days=1), datetime.date(2024, 3, 1))
    assert (str(split.first), str(split.last), str(split.holdout_first)) == ("2024-02-28", "2024-02-29", "2024-03-01")


def test_the_filters_take_each_day_of_a_table_once(tmp_path: Path) -> None:
    for number in range(1, 7):
        write_day(tmp_path / "t", f"2024-01-0{number}", [0.0] * number, None)
    split = DaySplit.of(_config(days=2, holdout_days=2), datetime.date(2024, 1, 5))
    table = open_table(tmp_path / "t")
    assert table.where(split.training_filter("date")).snapshot().rows == 2 + 3
    assert table.where(split.holdout_filter("date")).snapshot().rows == 4 + 5
    with pytest.raises(TableError, match="matches no rows"):
        table.where(split.training_filter("date")).where(split.holdout_filter("date")).snapshot()


def test_days_without_rows_and_folders_that_are_no_day_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 3):
        write_day(tmp_path / "t", f"2024-01-0{number}", [0.0], None)
    days = (datetime.date(2024, 1, 1), datetime.date(2024, 1, 3))
    where = "date between '2024-01-01' and '2024-01-03'"
    warn_of_days(open_table(tmp_path / "t").where(where).snapshot(), "date", *days)
    (gap,) = caplog.messages
    assert "no rows for 1 of the 3 days 2024-01-01 to 2024-01-03: 2024-01-02." in gap
    caplog.clear()
    write_day(tmp_path / "t", "2024-01-02", [0.0], None)
    warn_of_days(open_table(tmp_path / "t").where(where).snapshot(), "date", *days)
    assert caplog.messages == []
    write_day(tmp_path / "t", "oops", [0.0], None)
    warn_of_days(open_table(tmp_path / "t").where(where).snapshot(), "date", *days)
    (odd,) = caplog.messages
    assert "not every partition date=... is a day" in odd


def test_only_a_day_written_as_year_month_day_is_a_date() -> None:
    assert _day("2013-06-30", "--date") == datetime.date(2013, 6, 30)
    for text in ("20130630", "2013-W26-7", "2013-6-30", "2013-02-30", "2013-06-30\n"):
        with pytest.raises(ConfigError, match="is not a day") as caught:
            _day(text, "--date")
        assert caught.value.fix == "Write it as YYYY-MM-DD."


def test_a_run_has_a_folder_of_its_date_and_strategy_unless_it_is_named() -> None:
    config, date = _config(sync="local_sgd:every=16"), datetime.date(2024, 1, 5)
    assert run_folder(config, date) == "/lake/checkpoints/clicks/2024-01-05-local_sgd-every-16"
    assert run_folder(config, date, "mine") == "/lake/checkpoints/clicks/mine"


def test_days_before_the_calendar_and_names_that_lead_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0001-01-03 less training\.days=400"):
        DaySplit.of(_config(400), datetime.date(1, 1, 3))
    date = datetime.date(2024, 1, 2)
    for name in ("../other", "/tmp/run", "a/b", "", "."):
        with pytest.raises(ConfigError, match="--run-name"):
            run_folder(_config(), date, name)
    assert run_folder(_config(), date, "lr=0.1_b").endswith("/clicks/lr=0.1_b")
