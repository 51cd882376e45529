"""The evaluation job: a trained run on the held-out days, beside the current version."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from dl_on_spark.config import PipelineConfig
from dl_on_spark.jobs.days import DaySplit, day_tables, run_folder
from dl_on_spark.jobs.spark_progress import spark_progress
from dl_on_spark.lake import Table, storage
from dl_on_spark.registry import Judgement, Registry, SavedModel, Version, judge

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
    candidate = SavedModel.load(folder)
    current = registry_of(config).current()
    judged = judged_again(spark, config, date, candidate, current, quiet=quiet)
    return {key: value for key, value in judged.as_dict().items() if value is not None}


def judged_again(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    candidate: SavedModel,
    current: Version | None,
    *,
    quiet: bool = False,
) -> Judgement:
    """Judge the candidate beside the `current` version, and keep the result in its run's folder."""
    with spark_progress(spark, "evaluate", quiet=quiet):
        judged = judge(spark, candidate, current, held_out(config, date), config.gate)
    storage.write_bytes(storage.join(candidate.folder, METRICS), judged.to_json().encode())
    return judged


def registry_of(config: PipelineConfig) -> Registry:
    """The versions of the pipeline's model."""
    return Registry(config.data_path(config.registry), config.name)


def held_out(config: PipelineConfig, date: datetime.date) -> Table:
    """The rows that candidate and current model are judged on."""
    _, rows = day_tables(config, DaySplit.of(config, date))
    return rows
