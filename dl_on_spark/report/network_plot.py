"""An exchange's time against its size: measured points, the fitted model and the lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_network(output: Path, rows: Sequence[dict[str, Any]], workers: int) -> None:
    """Write the picture of `jobs.bench_network`'s rows; its kind (png, svg, pdf) follows the name's ending."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    sizes = [row["bytes"] for row in rows]
    for key, style, name in (("seconds", "o", "measured"), ("model_s", "-", "model"), ("bound_s", "--", "lower bound")):
        axes.plot(sizes, [row[key] * 1e3 for row in rows], style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms")
    axes.set_title(f"allreduce between {workers} workers", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=140)
    plt.close(figure)
