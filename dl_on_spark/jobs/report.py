"""The report job: collects what the runs of a date left and writes report.html."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from dl_on_spark.config import PipelineConfig
from dl_on_spark.jobs.days import DaySplit
from dl_on_spark.jobs.evaluate import METRICS
from dl_on_spark.lake import Snapshot, storage
from dl_on_spark.registry import Metrics
from dl_on_spark.report import Page, RunOnPage, render
from dl_on_spark.training import TrainingResult

_PACKAGES = ("pyspark", "tensorflow", "keras", "pyarrow", "numpy")


def write(
    output: Path | str,
    config: PipelineConfig,
    date: datetime.date,
    *,
    runs: Sequence[str],
    names: Sequence[str],
    single_process: str | None = None,
) -> None:
    """Write the page on `runs` (folders of finished, evaluated runs) to `output`."""
    days = DaySplit.of(config, date)
    results = [TrainingResult.from_json(storage.read_bytes(storage.join(run, "result.json"))) for run in runs]
    on_page = [
        RunOnPage(name, result.rows_per_second, _metrics(run), result.history)
        for run, name, result in zip(runs, names, results, strict=True)
    ]
    if single_process is not None:
        alone = json.loads(storage.read_bytes(storage.join(single_process, "single_process.json")))
        on_page.append(
            RunOnPage("single process", alone["rows_per_second"], _metrics(single_process), alone["history"])
        )
    snapshot = Snapshot.from_json(storage.read_bytes(storage.join(runs[0], "snapshot.json")).decode())
    first = results[0]
    page = Page(
        title=f"{config.name}: {date.isoformat()}",
        subtitle=f"{first.workers} workers, {first.epochs} epochs of {first.rows_per_epoch:,} rows; "
        f"held out: {days.holdout_first} to {days.holdout_last} ({on_page[0].metrics.rows:,} rows)",
        runs=tuple(on_page),
        facts={
            "Data": [
                ("table", snapshot.uri),
                ("days", f"{days.first} to {days.last}"),
                ("rows", f"{snapshot.rows:,}"),
                ("files, row groups", f"{len(snapshot.files):,}, {snapshot.num_row_groups:,}"),
                ("fingerprint", snapshot.fingerprint),
            ],
            "Runs": [
                *((f"{name}: steps", f"{result.steps:,}") for name, result in zip(names, results, strict=True)),
                *(
                    (f"{name}: sent between workers", f"{result.bytes_sent / 1e6:,.1f} MB")
                    for name, result in zip(names, results, strict=True)
                ),
                *((f"{name}: restarts", str(r.restarts)) for name, r in zip(names, results, strict=True)),
            ],
            "Settings": [
                ("model", config.training.model),
                ("rows per step, all workers", f"{config.training.global_batch_size:,}"),
                ("seed", str(config.training.seed)),
            ],
            "Versions": [
                ("python", platform.python_version()),
                *((package, importlib.metadata.version(package)) for package in _PACKAGES),
            ],
        },
        commands=tuple(
            f"spark-submit --py-files dl_on_spark.zip jobs/train.py --config pipeline.yaml --date {date} "
            f"--set training.sync={name}"
            for name in names
        ),
    )
    render(page, str(output))


def _metrics(folder: str) -> Metrics:
    return Metrics.from_json(storage.read_bytes(storage.join(folder, METRICS)))
