"""Finds each pipeline.yaml, and reads what a DAG needs of it; the jobs themselves check the rest."""

from __future__ import annotations

import datetime
import os
import zoneinfo
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HOME = "DL_ON_SPARK_HOME"
GLOB = "DL_ON_SPARK_PIPELINES"


@dataclass(frozen=True)
class Settings:
    """The section `airflow` of a pipeline.yaml: when to run, and how patiently."""

    schedule: str | None = "0 3 * * *"  # cron: at that hour, the day before is worked on; null: by hand or by assets
    assets: tuple[str, ...] = ()  # URIs of upstream tables: run when all of them were updated, instead of a schedule
    timezone: str = "UTC"
    start_date: datetime.date = datetime.date(2000, 1, 1)  # a backfill cannot begin before it
    connection: str = "spark_default"  # names the cluster where `cluster.master` does not
    pool: str = "dl_on_spark_training"
    retries: int = 2
    retry_delay_s: float = 60.0  # doubled by each retry, an hour at most
    wait_timeout_h: float = 6.0  # for the sources of the day
    train_timeout_h: float = 12.0
    job_timeout_h: float = 2.0  # of every other job
    on_failure: str | None = None  # module:function(context), called beside the line in the log

    def __post_init__(self) -> None:
        zoneinfo.ZoneInfo(self.timezone)
        object.__setattr__(self, "assets", tuple(self.assets))
        if not isinstance(self.start_date, datetime.date):
            raise ValueError(f"airflow.start_date {self.start_date!r} is not a day; write YYYY-MM-DD")


@dataclass(frozen=True)
class Pipeline:
    """One pipeline.yaml. ``config``: its path as the jobs are given it, below `home`."""

    home: Path
    config: str
    data: Mapping[str, Any] = field(hash=False)
    airflow: Settings

    @classmethod
    def load(cls, home: Path, file: Path) -> Pipeline:
        """Raises ValueError, TypeError or KeyError for what no DAG can be made of."""
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            raise ValueError("it has no name")
        return cls(home, str(file.relative_to(home)), data, Settings(**(data.get("airflow") or {})))

    @property
    def name(self) -> str:
        """Also the DAG's id."""
        return str(self.data["name"])

    def data_path(self, path: str) -> str:
        """`path` on the lake, as the jobs find it: relative to `home`, where they are started."""
        lake = self.data.get("lake", "lake")
        if "://" in path:
            return path
        if "://" in lake:
            return path if path.startswith("/") else f"{lake.rstrip('/')}/{path}"
        return str(self.home / Path(lake).expanduser() / Path(path).expanduser())

    def uri(self, path: str) -> str:
        """`data_path` with a scheme, as an asset's name needs."""
        found = self.data_path(path)
        return found if "://" in found else f"file://{found}"


def find_pipelines() -> tuple[list[Pipeline], list[str]]:
    """The pipelines below $DL_ON_SPARK_HOME that match $DL_ON_SPARK_PIPELINES, and what is wrong with others.

    Default pattern: ``*/*/pipeline.yaml``. Two of one name: the second is wrong.
    """
    home = os.environ.get(HOME)
    if not home or not Path(home).is_dir():
        return [], [f"{HOME}={home or ''} is not a folder; set it to the one with jobs/ and the pipelines"]
    pipelines: dict[str, Pipeline] = {}
    problems = []
    root = Path(home).absolute()
    for file in sorted(root.glob(os.environ.get(GLOB, "*/*/pipeline.yaml"))):
        try:
            pipeline = Pipeline.load(root, file)
            if pipeline.name in pipelines:
                raise ValueError(f"{pipelines[pipeline.name].config} has the name {pipeline.name!r} too")
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
            problems.append(f"{file}: {error}")
        else:
            pipelines[pipeline.name] = pipeline
    return list(pipelines.values()), problems
