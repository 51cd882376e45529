"""The report job: collects what the runs of a date left and writes report.html."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dl_on_spark.config import GateConfig, PipelineConfig
from dl_on_spark.errors import InputError
from dl_on_spark.jobs.days import DaySplit, run_folder
from dl_on_spark.jobs.evaluate import METRICS
from dl_on_spark.lake import Snapshot, storage
from dl_on_spark.registry import Judgement, decide
from dl_on_spark.report import Page, RunOnPage, Verdict, render
from dl_on_spark.report.time_split import described, step_parts
from dl_on_spark.training import TrainingResult

_PACKAGES = ("pyspark", "tensorflow", "keras", "pyarrow", "numpy")


def run(
    config: PipelineConfig, date: datetime.date, *, run_names: Sequence[str] = (), output: str | None = None
) -> dict[str, Any]:
    """Write the report on a date's runs: those named, or all of the date that are evaluated.

    ``output``: default ``reports/<name>/<date>.html`` below the lake.
    """
    found = [run_folder(config, date, name) for name in run_names] or _evaluated(config, date)
    names = [folder.rsplit("/", 1)[1].removeprefix(f"{date.isoformat()}-") for folder in found]
    page = output or config.data_path(f"reports/{config.name}/{date.isoformat()}.html")
    write(page, config, date, runs=found, names=names)
    return {"report": page, "runs": ", ".join(names)}


def write(
    output: Path | str,
    config: PipelineConfig,
    date: datetime.date,
    *,
    runs: Sequence[str],
    names: Sequence[str],
    single_process: str | None = None,
) -> None:
    """Write the page on `runs` (folders of finished, evaluated runs) to `output`.

    Raises `InputError` for a run that is not finished or not evaluated.
    """
    if not runs:
        raise InputError("a report needs a run.", fix="Run the training job first.")
    days = DaySplit.of(config, date)
    results = [TrainingResult.from_json(_read(run, "result.json", "training")) for run in runs]
    judged = [_judged(run) for run in runs]
    on_page = [
        RunOnPage(
            name,
            result.rows_per_second,
            one.metrics,
            result.history,
            step_parts(result.seconds_by_rank),
            _verdict(one, config.gate),
        )
        for name, result, one in zip(names, results, judged, strict=True)
    ]
    if single_process is not None:
        alone = json.loads(_read(single_process, "single_process.json", "single-process training"))
        on_page.append(
            RunOnPage("single process", alone["rows_per_second"], _judged(single_process).metrics, alone["history"])
        )
    snapshot = Snapshot.from_json(_read(runs[0], "snapshot.json", "training").decode())
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
                (
                    name,
                    f"{result.steps:,} steps, {result.bytes_sent / 1e6:,.1f} MB between the workers, "
                    f"{result.restarts} restarts",
                )
                for name, result in zip(names, results, strict=True)
            ],
            "Where time went": [
                (name, described(result.seconds_by_rank)) for name, result in zip(names, results, strict=True)
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
            f"spark-submit --py-files dl_on_spark.zip jobs/{job}.py --config pipeline.yaml --date {date}{options}"
            for job, options in _jobs([_strategy(run) for run in runs], days)
        ),
    )
    render(page, str(output))


def _evaluated(config: PipelineConfig, date: datetime.date) -> list[str]:
    """Folders of the date's runs that the evaluate job has judged."""
    root = storage.join(config.data_path(config.training.checkpoint_dir), config.name)
    names = [path.removesuffix(f"/{METRICS}") for path in storage.list_files(root) if path.endswith(f"/{METRICS}")]
    found = [n for n in names if n.startswith(f"{date.isoformat()}-") and storage.exists(f"{root}/{n}/result.json")]
    if not found:
        raise InputError(f"{root} has no evaluated run of {date}.", fix="Run the train and evaluate jobs first.")
    return [storage.join(root, name) for name in found]


def _strategy(run: str) -> str:
    """The strategy that a run was trained with, as pipeline.yaml writes it."""
    return str(json.loads(_read(run, "run.json", "training"))["identity"]["sync"])


def _jobs(strategies: Sequence[str], days: DaySplit) -> list[tuple[str, str]]:
    """(job, options) that repeat the runs of these strategies and judge them."""
    runs = [(job, f" --set training.sync={name}") for name in strategies for job in ("train", "evaluate")]
    return [("etl", f" --start-date {days.first}"), *runs]


def _verdict(judged: Judgement, gate: GateConfig) -> Verdict | None:
    """None where the gate cannot decide, as on rows of one class."""
    try:
        return Verdict(decide(judged, gate), judged, gate)
    except InputError:
        return None


def _judged(folder: str) -> Judgement:
    return Judgement.from_json(_read(folder, METRICS, "evaluate"))


def _read(folder: str, name: str, job: str) -> bytes:
    try:
        return storage.read_bytes(storage.join(folder, name))
    except FileNotFoundError as error:
        raise InputError(f"{folder} holds no {name}.", fix=f"Run the {job} job first.") from error
