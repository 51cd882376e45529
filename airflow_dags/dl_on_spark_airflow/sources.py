"""Waits until the raw tables of the day are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, ObjectStoragePath

from dl_on_spark_airflow.pipelines import Pipeline
from dl_on_spark_airflow.run_date import run_date

if TYPE_CHECKING:
    from airflow.sdk import Context


class SourcesSensor(BaseSensorOperator):
    """True when each source of the ETL holds a file: in the partition of the day where it has partitions.

    A source on an object store is asked through Airflow's own connection to it (provider amazon, google and so on).
    """

    def __init__(self, *, pipeline: Pipeline, **kwargs: Any) -> None:
        super().__init__(mode="reschedule", **kwargs)  # a waiting task holds no slot
        self.pipeline = pipeline

    def poke(self, context: Context) -> bool:
        """Look once, and say what is missing."""
        date = run_date(context, self.pipeline.airflow.timezone)
        missing = [folder for folder in source_folders(self.pipeline, date) if not _has_files(folder)]
        for folder in missing:
            self.log.info("no files yet in %s", folder)
        return not missing


def source_folders(pipeline: Pipeline, date: str) -> list[str]:
    """Where the sources of `date` lie."""
    folders = []
    for source in pipeline.data["etl"]["sources"].values():
        partition = f"/{source['partition']}={date}" if source.get("partition") else ""
        folders.append(pipeline.data_path(source["path"]).rstrip("/") + partition)
    return folders


def _has_files(folder: str) -> bool:
    path = ObjectStoragePath(folder) if "://" in folder else Path(folder)
    if path.is_file():
        return True
    return path.is_dir() and any(not found.name.startswith((".", "_")) for found in path.iterdir())
