"""The ETL job: raw files of a day, or of a range of days, become partitions of the feature table."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, cast

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import ConfigError
from dl_on_spark.jobs.spark_progress import spark_progress
from dl_on_spark.lake.etl import Transform, run_etl
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.sources import Source
from dl_on_spark.references import load_function

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    *,
    start_date: datetime.date | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Process `start_date` (default: `date`) to `date`; returns counts of rows, rejects and partitions."""
    first = start_date or date
    if first > date:
        raise ConfigError(f"--start-date {first} is after --date {date}.", fix="Exchange them.")
    sources = [
        Source(
            name=name,
            uri=config.data_path(source.path),
            format=source.format,
            schema=None if source.source_schema is None else Schema.load(config.schema_path(source.source_schema)),
            partition=source.partition,
            lookback_days=source.lookback_days,
        )
        for name, source in config.etl.sources.items()
    ]
    with spark_progress(spark, "etl", quiet=quiet):
        report = run_etl(
            spark,
            sources=sources,
            transform=cast(Transform, load_function(config.etl.transform)),
            schema=Schema.load(config.schema_path()),
            table=config.data_path(config.etl.table),
            quarantine=config.data_path(config.etl.quarantine),
            first=first,
            last=date,
            date_column=config.date_column,
            max_rejected=config.etl.max_rejected,
            rows_per_file=config.etl.rows_per_file,
        )
    return {
        "table": report.written.uri,
        "days": len(report.written.partitions),
        "rows": report.written.rows,
        "rejected": report.rejected,
        "missing": {name: [str(day) for day in days] for name, days in report.missing.items()},
        "quarantine": config.data_path(config.etl.quarantine),
        "checks": [check.to_dict() for check in report.checks],
    }
