"""What the gate looked at, drawn: the slices and the drift of the inputs."""

from __future__ import annotations

from collections.abc import Mapping

from dl_on_spark.config import GateConfig
from dl_on_spark.registry.comparison import Comparison
from dl_on_spark.registry.gate import is_worse
from dl_on_spark.report.plots import COLOURS, INK, as_svg, new_figure

_MOST = 24  # lines of a plot
_ROW = 0.21  # inches
_BAD = "#d6453d"
_LARGE_DRIFT = 0.25


def slice_plot(found: Comparison, gate: GateConfig) -> str:
    """Difference to the current model by slice, with its interval; without one, the metric by slice.

    The worst slices are drawn where there are many. Dotted: the loss that is tolerated.
    """
    sign = 1.0 if gate.direction == "max" else -1.0
    name = {"auc": "AUC"}.get(found.metric, found.metric.replace("_", " "))
    compared = [(one, one.difference) for one in found.slices if one.difference is not None]
    lines = max(1, min(len(found.slices), _MOST))
    figure, axes = new_figure(0.9 + _ROW * lines)
    if compared:
        shown = sorted(compared, key=lambda pair: sign * pair[1].value)[:_MOST]
        for place, (one, gap) in enumerate(shown):
            colour = _BAD if is_worse(one, gate) else COLOURS[0]
            axes.plot([gap.low, gap.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="round")
            axes.plot([gap.value], [place], "o", color=colour, markersize=4)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.axvline(-sign * gate.max_slice_loss, color=INK, linewidth=1, linestyle=":")
        axes.set_xlabel(f"{name}: candidate less current")
        names = [f"{one.name}  ({one.rows:,})" for one, _ in shown]
    else:
        plain = sorted(found.slices, key=lambda one: sign * one.candidate)[:_MOST]
        axes.plot([one.candidate for one in plain], range(len(plain)), "o", color=COLOURS[0], markersize=5)
        axes.set_xlabel(f"{name} of the candidate")
        names = [f"{one.name}  ({one.rows:,})" for one in plain]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=5)
    return as_svg(figure, axes, legend=False)


def drift_bars(found: Mapping[str, float], most: float | None) -> str:
    """Population stability index by feature, largest first; dotted: the limit, or where a shift is called large.

    A bar ends at four times that: one feature that went elsewhere must not hide the others.
    """
    limit = _LARGE_DRIFT if most is None else most
    shown = sorted(found.items(), key=lambda item: -item[1])[:_MOST]
    figure, axes = new_figure(0.9 + _ROW * len(shown))
    colours = [_BAD if index > limit else COLOURS[0] for _, index in shown]
    lengths = [min(index, 4 * limit) for _, index in shown]
    bars = axes.barh([name for name, _ in shown], lengths, color=colours, height=0.6)
    for label in axes.bar_label(bars, labels=[f"{index:.3f}" for _, index in shown], padding=4, fontsize=8):
        label.set_color(INK)
    axes.axvline(limit, color=INK, linewidth=1, linestyle=":")
    axes.set_xlabel("population stability index")
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    return as_svg(figure, axes, legend=False)
