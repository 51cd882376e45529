"""A plan as a picture: time of an epoch and efficiency against workers, each way a line, with the lower bound."""

from __future__ import annotations

from pathlib import Path

from dl_on_spark.concurrency import WAYS, Cluster, Plan, Workload
from dl_on_spark.concurrency.ways import bound


def draw_plan(output: Path, plan: Plan, cluster: Cluster, workload: Workload) -> None:
    """Write the picture; its kind (png, svg, pdf) follows the name's ending."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    counts = sorted({e.workers for e in plan.estimates})
    steps = -(-workload.rows // plan.chosen.batch)
    for name, way in WAYS.items():
        found = plan.of(name)
        if not found:
            continue
        style = (
            {"marker": "o", "markersize": 3.5, "linewidth": 1.6} if way.runs else {"linestyle": ":", "linewidth": 1.3}
        )
        x = [e.workers for e in found]
        (line,) = left.plot(x, [e.step_s * steps for e in found], label=name, **style)
        right.plot(x, [100 * e.efficiency for e in found], color=line.get_color(), **style)
    load = workload if workload.batch == plan.chosen.batch else None
    if load is not None:
        bounds = [bound(load, cluster, count) for count in counts]
        left.plot(counts, [b * steps for b in bounds], color="0.35", linewidth=1, linestyle="--", label="lower bound")
        alone = load.compute_s(load.batch)
        right.plot(
            counts, [100 * alone / b / c for b, c in zip(bounds, counts, strict=True)], "--", color="0.35", linewidth=1
        )
    chosen = plan.chosen
    left.plot([chosen.workers], [chosen.step_s * steps], "*", color="black", markersize=13, label="recommended")
    right.plot([chosen.workers], [100 * chosen.efficiency], "*", color="black", markersize=13)
    for axes, what in ((left, "seconds an epoch"), (right, "efficiency, % of P times one worker")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.set_xlabel("workers")
        axes.set_ylabel(what)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    right.set_ylim(0, 105)
    left.legend(fontsize=7.5, frameon=False)
    figure.suptitle(f"{plan.chosen.batch:,} rows a step; dotted: counted, not run by the trainer", fontsize=10)
    figure.savefig(output, dpi=140)
    plt.close(figure)
