"""report.html: one file without network that says what ran on what, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

import jinja2

from dl_on_spark.config import GateConfig
from dl_on_spark.lake import storage
from dl_on_spark.registry import Decision, Judgement
from dl_on_spark.registry.metrics import Metrics
from dl_on_spark.report.gate_plots import drift_bars, slice_plot
from dl_on_spark.report.plots import calibration_plot, learning_curves, step_bars, throughput_bars


@dataclass(frozen=True)
class Verdict:
    """The gate's decision on a run, with what it looked at."""

    decision: Decision
    judged: Judgement
    gate: GateConfig


@dataclass(frozen=True)
class RunOnPage:
    """One row of the comparison: a run of the trainer, or the peer it is compared with.

    ``step_seconds``: of a step, by what they were spent on (`time_split.step_parts`). ``verdict``: what the gate says.
    """

    name: str
    rows_per_second: float
    metrics: Metrics
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None


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
    bins = {run.name: run.metrics.calibration for run in page.runs if run.metrics.calibration}
    steps = {run.name: run.step_seconds for run in page.runs if run.step_seconds}
    plots = {
        **({"Loss by epoch": learning_curves(histories, "loss")} if trained else {}),
        **({"AUC by epoch": learning_curves(histories, "auc")} if any("auc" in r.history for r in trained) else {}),
        **({"Calibration on the held-out days": calibration_plot(bins)} if bins else {}),
        "Throughput": throughput_bars({run.name: run.rows_per_second for run in page.runs}),
        **({"Where a step's time went": step_bars(steps)} if steps else {}),
        **_gate_plots(page.runs),
    }
    # Read as a resource: in a spark-submit job the package lies in a zip archive.
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    html = (
        jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        .from_string(template)
        .render(page=page, plots=plots, baseline=page.runs[0].metrics, best=_best([run.metrics for run in page.runs]))
    )
    storage.write_bytes(output, html.encode())


def _gate_plots(runs: Sequence[RunOnPage]) -> dict[str, str]:
    """Slices and drift by title; the inputs are the same for all runs, so the first one's drift is drawn."""
    verdicts = {run.name: run.verdict for run in runs if run.verdict is not None}
    found = {
        f"Slices: {name}": slice_plot(verdict.judged.comparison, verdict.gate)
        for name, verdict in verdicts.items()
        if verdict.judged.comparison.slices
    }
    moved = [verdict for verdict in verdicts.values() if verdict.judged.drift]
    if moved:
        found["Drift of the inputs since training"] = drift_bars(moved[0].judged.drift, moved[0].gate.max_drift)
    return found


def _best(metrics: Sequence[Metrics]) -> dict[str, float | None]:
    """The best value of each metric; None where no run has it."""

    def among(name: str, choose: Callable[[Iterable[float]], float]) -> float | None:
        values = [value for found in metrics if (value := getattr(found, name)) is not None]
        return choose(values) if values else None

    errors = ("log_loss", "mean_squared_error", "mean_absolute_error")
    return {"auc": among("auc", max), **{name: among(name, min) for name in errors}}
