"""report.html: one file without network that says what ran on what, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from dl_on_spark.lake import storage
from dl_on_spark.registry.evaluate import Metrics
from dl_on_spark.report.plots import calibration_plot, learning_curves, throughput_bars


@dataclass(frozen=True)
class RunOnPage:
    """One row of the comparison: a run of the trainer, or the peer it is compared with."""

    name: str
    rows_per_second: float
    metrics: Metrics
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """Everything on the page. ``facts``: tables of (what, value) by heading; ``commands``: how to repeat it."""

    title: str
    subtitle: str
    runs: tuple[RunOnPage, ...]
    facts: Mapping[str, Sequence[tuple[str, str]]]
    commands: tuple[str, ...]


def render(page: Page, output: str) -> None:
    """Write the page to `output`, complete or not at all."""
    trained = [run for run in page.runs if run.history]
    histories = {run.name: run.history for run in trained}
    plots = {
        "Loss by epoch": learning_curves(histories, "loss"),
        **({"AUC by epoch": learning_curves(histories, "auc")} if any("auc" in r.history for r in trained) else {}),
        "Calibration on the held-out days": calibration_plot({run.name: run.metrics.calibration for run in page.runs}),
        "Throughput": throughput_bars({run.name: run.rows_per_second for run in page.runs}),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    html = environment.get_template("page.html").render(page=page, plots=plots, baseline=page.runs[0].metrics)
    storage.write_bytes(output, html.encode())
