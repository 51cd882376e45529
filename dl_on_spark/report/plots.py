"""Plots of the report as SVG text that follows the page's colours."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dl_on_spark.registry.metrics import CalibrationBin

COLOURS = ("#4780e8", "#e0872e", "#2f9e62", "#b04bb0")
# Text and axes take the page's text colour, in dark and in light.
INK = "#7a7a01"
# Left out: the date would change the bytes, and the block that holds the rest names web addresses.
_METADATA = ("Date", "Creator", "Format", "Type")


def learning_curves(histories: Mapping[str, Mapping[str, Sequence[float]]], metric: str) -> str:
    """`metric` by epoch for each run: solid on training rows, dashed on validation rows."""
    figure, axes = new_figure()
    for colour, (name, history) in zip(itertools.cycle(COLOURS), histories.items(), strict=False):
        for key, style, what in ((metric, "-", "training"), (f"val_{metric}", "--", "held out")):
            if key in history:
                epochs = range(1, len(history[key]) + 1)
                axes.plot(epochs, history[key], style, color=colour, marker="o", markersize=4, label=f"{name}, {what}")
    axes.set_xlabel("epoch")
    axes.set_ylabel({"auc": "AUC"}.get(metric, metric.replace("_", " ")))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return as_svg(figure, axes)


def calibration_plot(bins: Mapping[str, Sequence[CalibrationBin]]) -> str:
    """Observed rate against mean score, by run; the dotted diagonal is perfect."""
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], ":", color=INK, label="perfect")
    for colour, (name, found) in zip(itertools.cycle(COLOURS), bins.items(), strict=False):
        x, y = [b.mean_score for b in found], [b.observed_rate for b in found]
        axes.plot(x, y, "-", color=colour, marker="o", markersize=4, label=name)
    axes.set_xlabel("predicted probability")
    axes.set_ylabel("observed rate")
    axes.set_xlim(-0.02, 1.02)  # room for the markers at the ends
    axes.set_ylim(-0.02, 1.02)
    return as_svg(figure, axes)


def throughput_bars(rows_per_second: Mapping[str, float]) -> str:
    """Rows per second by run."""
    figure, axes = new_figure()
    names = list(rows_per_second)
    bars = axes.barh(
        names,
        list(rows_per_second.values()),
        color=list(itertools.islice(itertools.cycle(COLOURS), len(names))),
        height=0.55,
    )
    labels = axes.bar_label(bars, labels=[f"{value:,.0f}" for value in rows_per_second.values()], padding=4)
    for label in labels:
        label.set_color(INK)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("rows per second")
    axes.margins(x=0.2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    axes.invert_yaxis()
    return as_svg(figure, axes, legend=False)


def step_bars(parts: Mapping[str, Mapping[str, float]]) -> str:
    """Milliseconds of a step by run, a colour each part; ``parts``: seconds by run and part."""
    figure, axes = new_figure()
    names = list(parts)
    left = [0.0] * len(names)
    for colour, part in zip(COLOURS, next(iter(parts.values())), strict=False):
        width = [parts[name][part] * 1e3 for name in names]
        axes.barh(names, width, left=left, color=colour, height=0.55, label=part)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ms a step")
    axes.invert_yaxis()
    return as_svg(figure, axes)


def new_figure(height: float = 2.9) -> tuple[Any, Any]:
    """A figure of a card's width, `height` inches high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, color=INK)
    axes.set_axisbelow(True)
    return figure, axes


def as_svg(figure: Any, axes: Any, legend: bool = True) -> str:
    """The figure as SVG text whose ink is the page's."""
    if legend:
        # Below the axes: inside, it hides lines once there are several runs.
        names = axes.get_legend_handles_labels()[1]
        columns = 1 if any(len(name) > 24 for name in names) else 2
        figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(names) / columns))
        figure.legend(
            loc="outside lower left", ncols=columns, frameon=False, handlelength=3.2, fontsize=9, labelcolor=INK
        )
    axes.tick_params(colors=INK, labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dl_on_spark", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(_METADATA))
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")
