"""`dl-on-spark doctor`: can this cluster train this pipeline, and if not, what has to be set where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from dl_on_spark.config import PipelineConfig
from dl_on_spark.launch import Finding, examine
from dl_on_spark.sync import StageAveraging, parse_sync

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MARKS = {"ok": ("ok", "green"), "warning": ("look", "yellow"), "error": ("BAD", "bold red")}


def run(spark: SparkSession, config: PipelineConfig | None, workers: int | None = None) -> list[Finding]:
    """All findings for ``workers`` workers (default: the pipeline's, or 2), bad ones first, within 30 s.

    With a pipeline its table is read, and its folders are written to, from the executors; nothing is left there.
    """
    training = None if config is None else config.training
    readable: list[str] = []
    writable: list[str] = []
    if config is not None:
        readable = [config.data_path(config.etl.table)]
        writable = [config.data_path(config.training.checkpoint_dir)]
    findings = examine(
        spark,
        workers or (2 if training is None else training.num_workers),
        gpus_per_worker=0 if training is None else training.gpus_per_worker,
        cpus_per_worker=None if training is None else training.cpus_per_worker,
        readable=readable,
        writable=writable,
        peers=True,
        barrier=training is None or not isinstance(parse_sync(training.sync), StageAveraging),
    )
    order = list(_MARKS)[::-1]
    return sorted(findings, key=lambda finding: order.index(finding.level))


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {"ready": is_ready(findings), "findings": [asdict(finding) for finding in findings]}


def is_ready(findings: Sequence[Finding]) -> bool:
    """Whether nothing stands in the way of training."""
    return all(finding.level != "error" for finding in findings)


def show(findings: Sequence[Finding], console: Console) -> None:
    """A line each finding: how it is, what was seen and where, what to set."""
    grid = Grid("", "seen", "where", show_lines=True, title_justify="left", title="doctor")
    for finding, times in Counter(findings).items():
        mark, style = _MARKS[finding.level]
        seen = Text(finding.what, overflow="fold")
        if times > 1:
            seen.append(f" ({times} workers)")
        if finding.fix:
            seen.append(f"\n{finding.fix}", style="bold")
        grid.add_row(Text(mark, style), seen, Text(finding.where, overflow="fold"))
    console.print(grid)
    bad = sum(finding.level == "error" for finding in findings)
    console.print("Ready to train." if not bad else f"Not ready: {bad} of these must be mended first.")
