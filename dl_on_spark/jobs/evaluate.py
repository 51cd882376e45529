"""The evaluation job: a trained run on the held-out days."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dl_on_spark.config import PipelineConfig
from dl_on_spark.jobs.days import DaySplit, day_tables, run_folder
from dl_on_spark.jobs.spark_progress import spark_progress
from dl_on_spark.lake import Table, storage
from dl_on_spark.registry import SavedModel, evaluate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

METRICS = "metrics.json"


def run(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    *,
    run_name: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write metrics.json into the run's folder; returns its values."""
    folder = run_folder(config, date, run_name)
    with spark_progress(spark, "evaluate", quiet=quiet):
        metrics = evaluate(spark, SavedModel.load(folder), held_out(config, date))
    storage.write_bytes(storage.join(folder, METRICS), metrics.to_json().encode())
    return {key: value for key, value in asdict(metrics).items() if value is not None}


def held_out(config: PipelineConfig, date: datetime.date) -> Table:
    """The rows that candidate and current model are judged on."""
    _, rows = day_tables(config, DaySplit.of(config, date))
    return rows
