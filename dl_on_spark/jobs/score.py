"""The scoring job: one day's rows with the current model."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import InputError
from dl_on_spark.jobs.days import day_filter
from dl_on_spark.jobs.spark_progress import spark_progress
from dl_on_spark.lake import open_table
from dl_on_spark.registry import Registry, SavedModel
from dl_on_spark.scoring import score

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(spark: SparkSession, config: PipelineConfig, date: datetime.date, *, quiet: bool = False) -> dict[str, Any]:
    """Replace the day's partition of the scores table."""
    registry = Registry(config.data_path(config.registry), config.name)
    current = registry.current()
    if current is None:
        raise InputError(f"model {config.name!r} has no published version.", fix="Run the publish job first.")
    table = open_table(config.data_path(config.etl.table)).where(day_filter(config.date_column, date))
    with spark_progress(spark, "score", quiet=quiet):
        report = score(
            spark,
            SavedModel.load(current.folder),
            current.number,
            table,
            config.data_path(config.scoring.table),
            date_column=config.date_column,
            batch_rows=config.scoring.batch_size,
        )
    return asdict(report)
