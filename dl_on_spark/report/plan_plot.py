"""A plan as a picture: epoch time and efficiency against workers, a line each way, with the lower bound."""

from __future__ import annotations

from pathlib import Path

from dl_on_spark.concurrency import WAYS, Cluster, Plan, Workload
from dl_on_spark.concurrency.ways import bound


def draw_plan(output: Path, plan: Plan, cluster: Cluster, workload: Workload) -> None:
    """Write the picture of `plan`, which was made for `workload`; its kind (png, svg, pdf) follows the name."""
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
    bounds = [bound(workload, cluster, count) for count in counts]
    alone = workload.compute_s(workload.batch)
    ideal = [100 * alone / b / count for b, count in zip(bounds, counts, strict=True)]
    left.plot(counts, [b * steps for b in bounds], color="0.35", linewidth=1, linestyle="--", label="lower bound")
    right.plot(counts, ideal, "--", color="0.35", linewidth=1)
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
