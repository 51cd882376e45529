"""What strategies cost and reach: the metric by epoch, and speed and exposed communication as bars."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any


def draw_strategies(folder: Path, found: dict[str, Any]) -> None:
    """Write ``metric.png`` and ``speed.png`` of `jobs.bench_strategies`'s result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in found["rows"] if "error" not in row]
    names = [f"{row['sync']}, {row['workers']} workers" for row in rows]
    alone = found["single_process"]

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    styles = itertools.product(("-", "--", ":"), matplotlib.color_sequences["tab10"])
    for row, name, (style, colour) in zip(rows, names, styles, strict=False):
        if row["curve"]:
            axes.plot(range(1, len(row["curve"]) + 1), row["curve"], style, color=colour, marker=".", label=name)
    axes.axhline(alone["metric"], color="black", linewidth=1, label="one process, at its end")
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"{found['metric']}, held out")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(plt, figure, [axes], folder / "metric.png")

    figure, (speed, exposed) = plt.subplots(1, 2, figsize=(10, 1 + 0.3 * len(rows)), layout="constrained", sharey=True)
    speed.barh(names, [row["rows_per_second"] for row in rows], color="#2f6fde")
    speed.axvline(alone["rows_per_second"], color="black", linewidth=1)
    speed.set_xlabel("rows/s (line: one process)")
    exposed.barh(names, [row["exposed_s_per_step"] * 1e3 for row in rows], color="#e0872e")
    exposed.set_xlabel("exposed communication, ms a step")
    speed.invert_yaxis()
    speed.tick_params(axis="y", labelsize=7)
    _save(plt, figure, [speed, exposed], folder / "speed.png")


def _save(plt: Any, figure: Any, panels: list[Any], file: Path) -> None:
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=140)
    plt.close(figure)
