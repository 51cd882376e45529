"""A small lake of real flights: raw CSV files of three weeks, for the jobs."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from dl_on_spark.jobs.package import build_archive
from tests.cluster import REPOSITORY

FIRST_DAY = datetime.date(2013, 6, 9)
DATE = datetime.date(2013, 6, 30)
NEXT_DAY = datetime.date(2013, 7, 1)
PIPELINE = REPOSITORY / "examples" / "flight_delay" / "pipeline.yaml"
SMALL = (
    "training.days=14",
    "training.holdout_days=7",
    "training.epochs=2",
    "gate.min_gain_over_baseline=0.0",
)


@pytest.fixture(scope="session")
def raw_flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with flights, weather and planes of `FIRST_DAY` to `NEXT_DAY` as raw files."""
    from examples.flight_delay.raw import lay_down

    raw = tmp_path_factory.mktemp("flights") / "raw"
    lay_down(str(raw), first=FIRST_DAY, last=NEXT_DAY)
    return raw


@pytest.fixture(scope="session")
def py_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive that a user ships with `spark-submit --py-files`."""
    archive = tmp_path_factory.mktemp("archive") / "dl_on_spark.zip"
    build_archive(archive, [REPOSITORY / "examples"])
    return archive
