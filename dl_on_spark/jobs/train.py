"""The training job: the days up to a date, without the held-out last ones."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, cast

from dl_on_spark.config import PipelineConfig
from dl_on_spark.jobs.days import DaySplit, day_tables, run_folder, warn_of_days
from dl_on_spark.lake import Schema
from dl_on_spark.sync.noise_scale import batch_advice
from dl_on_spark.training import Trainer
from dl_on_spark.training.trainer import Resume

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    *,
    run_name: str | None = None,
    resume: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Train on the pipeline's days, with the held-out days as validation; returns the run's key figures."""
    training, days = config.training, DaySplit.of(config, date)
    train_rows, held_out = day_tables(config, days)
    warn_of_days(train_rows.snapshot(spark), config.date_column, days.first, days.last)
    warn_of_days(held_out.snapshot(spark), config.date_column, days.holdout_first, days.holdout_last)
    trainer = Trainer(
        model=training.model,
        sync=training.sync,
        num_workers=training.num_workers,
        gpus_per_worker=training.gpus_per_worker,
        cpus_per_worker=training.cpus_per_worker,
        checkpoint_dir=run_folder(config, date, run_name),
        max_restarts=training.max_restarts,
        deadline_s=training.deadline_s,
        checkpoint_every=training.checkpoint_every,
    )
    result = trainer.fit(
        spark,
        train_rows,
        schema=Schema.load(config.schema_path()),
        validation=held_out,
        global_batch_size=training.global_batch_size,
        epochs=training.epochs,
        seed=training.seed,
        resume=cast(Resume, resume),
        class_weight=training.class_weight,
        quiet=quiet,
    )
    metrics: dict[str, Any] = {f"metric_{name}": value for name, value in result.metrics.items()}
    noise_scale = result.metrics.get("noise_scale")
    if noise_scale is not None:
        steps = result.epochs * -(-result.rows_per_epoch // training.global_batch_size)
        rows = training.global_batch_size * max(1, round(steps / result.steps))  # of an update that accumulates
        metrics["batch_advice"] = batch_advice(noise_scale, rows)
    return {
        "run": result.run_dir,
        "model": result.model_path,
        "sync": training.sync,
        "workers": result.workers,
        "epochs": result.epochs,
        "steps": result.steps,
        "rows_per_epoch": result.rows_per_epoch,
        "rows_per_second": result.rows_per_second,
        "bytes_sent": result.bytes_sent,
        "restarts": result.restarts,
        **metrics,
    }
