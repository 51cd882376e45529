"""`dl-on-spark bench strategies`: every strategy on one table, beside one process of plain Keras.

All runs see the same rows, batches, epochs and seed, and are judged on the same held-out days. So the metric tells
what a strategy costs in accuracy, and the rest what it costs in time and bytes here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import DLOnSparkError, InputError
from dl_on_spark.jobs import evaluate, train
from dl_on_spark.jobs.alone import train_alone
from dl_on_spark.jobs.days import run_folder
from dl_on_spark.training.run_folder import RunFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STRATEGIES = (
    "allreduce",
    "allreduce:compress=fp16",
    "allreduce:compress=topk(0.01)",
    "allreduce:compress=powersgd(2)",
    "local_sgd:every=16",
    "local_sgd:every=16,outer=nesterov(0.7,0.9)",
    "elastic_averaging:every=4",
    "gossip:topology=ring",
    "parameter_server",
    "parameter_server:staleness=2",
    "parameter_server:staleness=inf",
    "stage_averaging:every=16",
)
_WIDTH = 130
WITHIN = 0.005
"""How far from the single process a metric may be, as a share of it, to count as reached."""


def run(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    *,
    workers: Sequence[int] = (2,),
    strategies: Sequence[str] = STRATEGIES,
    output: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train and judge; writes ``strategies.json`` and plots into `output`. Rows of the table, by workers and strategy.

    A strategy that fails is a row with its error.
    """
    metric, greater = config.gate.metric, config.gate.direction == "max"
    rows: list[dict[str, Any]] = []
    alone: dict[str, Any] | None = None
    for count in workers:
        for sync in strategies:
            name = f"bench-{count}-{''.join(c if c.isalnum() or c in '.' else '-' for c in sync)}"
            given = _with(config, sync, count)
            try:
                trained = train.run(spark, given, date, run_name=name, resume="never", quiet=quiet)
                judged = evaluate.run(spark, given, date, run_name=name, quiet=quiet)
            except DLOnSparkError as error:
                if isinstance(error, InputError) and not rows:
                    raise  # the pipeline's own: no other strategy would do better
                rows.append({"sync": sync, "workers": count, "error": error.message.splitlines()[-1]})
                continue
            if alone is None:
                alone = _alone(spark, config, date, trained["run"], quiet=quiet)
            rows.append({**_figures(trained["run"], metric), "sync": sync, "metric": judged[metric]})
    for row in rows:
        if "error" not in row and alone is not None:
            _compare(row, alone["metric"], greater)
    found = {"metric": metric, "single_process": alone, "rows": rows}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "strategies.json").write_text(json.dumps(found, indent=1) + "\n")
        if alone is not None:
            from dl_on_spark.report.strategies_plot import draw_strategies

            draw_strategies(output, found)
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """One line a run, the single process first."""
    columns = (
        "workers",
        "strategy",
        found["metric"],
        "within 0.5 %",
        "rows/s",
        "KB a step",
        "exposed ms",
        "steps to it",
    )
    grid = Grid(*columns, title="Strategies on the same rows, batches and seed", title_justify="left")
    alone = found["single_process"]
    if alone is not None:
        grid.add_row("", "one process of plain Keras", f"{alone['metric']:.4f}", "", f"{alone['rows_per_second']:,.0f}")
    for row in found["rows"]:
        if "error" in row:
            grid.add_row(str(row["workers"]), row["sync"], "failed", row["error"])
            continue
        reached = row["steps_to_target"]
        grid.add_row(
            str(row["workers"]),
            row["sync"],
            f"{row['metric']:.4f}",
            "yes" if row["within"] else f"no ({row['change']:+.2%})",
            f"{row['rows_per_second']:,.0f}",
            f"{row['bytes_per_step'] / 1e3:,.1f}",
            f"{row['exposed_s_per_step'] * 1e3:.2f}",
            "never" if reached is None else f"{reached:,}",
        )
    console.print(grid, width=max(console.width, _WIDTH), crop=False, no_wrap=True)  # a log has no width to heed


def _with(config: PipelineConfig, sync: str, workers: int) -> PipelineConfig:
    training = config.training.model_copy(update={"sync": sync, "num_workers": workers})
    return config.model_copy(update={"training": training})


def _alone(
    spark: SparkSession, config: PipelineConfig, date: datetime.date, beside: str, *, quiet: bool
) -> dict[str, Any]:
    name = "bench-single-process"
    trained = train_alone(config, beside, run_folder(config, date, name))
    judged = evaluate.run(spark, config, date, run_name=name, quiet=quiet)
    return {"metric": judged[config.gate.metric], "rows_per_second": trained["rows_per_second"]}


def _figures(folder: str, metric: str) -> dict[str, Any]:
    """Of a finished run; bytes and exposed seconds are those of one rank in one step, on average."""
    result = RunFolder(folder).result()
    assert result is not None
    timed = sum(one["steps"] for one in result.seconds_by_rank)
    exposed = sum(one["exchange"] + one["waiting"] for one in result.seconds_by_rank)
    return {
        "workers": result.workers,
        "rows_per_second": result.rows_per_second,
        "bytes_per_step": result.bytes_sent / result.steps / result.workers,
        "exposed_s_per_step": exposed / timed if timed else 0.0,
        "steps": result.steps,
        "steps_per_epoch": result.steps // result.epochs,
        "curve": result.history.get(f"val_{metric}", []),
    }


def _compare(row: dict[str, Any], alone: float, greater: bool) -> None:
    """How a run stands to the single process, and after how many steps an epoch's end was as good, within 0.5 %."""
    bound = alone * (1 - WITHIN if greater else 1 + WITHIN)
    reached = [value >= bound if greater else value <= bound for value in row["curve"]]
    row["change"] = row["metric"] / alone - 1
    row["within"] = row["metric"] >= bound if greater else row["metric"] <= bound
    row["steps_to_target"] = (reached.index(True) + 1) * row["steps_per_epoch"] if True in reached else None
