"""`dl-on-spark bench network`: what an exchange between the tasks of this cluster takes, by size."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid

from dl_on_spark.concurrency.communication import ALLREDUCE, Link, allreduce_bound
from dl_on_spark.concurrency.fit import fit_link
from dl_on_spark.jobs.session import spark_session
from dl_on_spark.launch import LaunchRequest, launch, preflight

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Where the collectives change from few messages to few bytes (collectives.choice).
_SMALL_BYTES = 128 << 10


def run(workers: int, *, output: Path | None = None, plot: Path | None = None) -> dict[str, Any]:
    """Measure in a session of its own; write the profile to `output` and draw to `plot`."""
    with spark_session(None, "bench network") as spark:
        found = measure(spark, workers)
    if output is not None:
        output.write_text(json.dumps(found["profile"], indent=1) + "\n")
    if plot is not None:
        from dl_on_spark.report.network_plot import draw_network

        draw_network(plot, found["exchanges"], workers)
    return found


def measure(spark: SparkSession, workers: int) -> dict[str, Any]:
    """Launch so many workers, time their exchanges of several sizes, and fit a link."""
    job = {"model": "", "snapshot": "", "schema": {}, "statistics": "", "cases": ()}
    preflight(spark, workers)
    request = LaunchRequest(workers, "dl_on_spark.training.measure:run", pickle.dumps(job), deadline_s=120.0)
    said = launch(spark, request, lambda _message: None)
    points = [(int(size), float(seconds)) for size, seconds in said[0]["exchanges"]]
    link = fit_link(points, workers, [algorithm(size) for size, _ in points])
    where = "inside" if len({one["host"] for one in said}) == 1 else "between"
    rows = [
        {
            "bytes": size,
            "seconds": seconds,
            "model_s": ALLREDUCE[algorithm(size)](size, workers, link).seconds,
            "bound_s": allreduce_bound(size, workers, link),
            "algorithm": algorithm(size),
        }
        for size, seconds in points
    ]
    profile = {where: {"latency_s": link.latency_s, "byte_s": link.byte_s}}
    return {"workers": workers, "where": where, "profile": profile, "exchanges": rows}


def algorithm(size: int) -> str:
    """What carries an allreduce of so many bytes."""
    return "recursive_doubling" if size <= _SMALL_BYTES else "ring"


def show(found: dict[str, Any], console: Console) -> None:
    """A table of sizes; the fitted link last."""
    grid = Grid(
        "bytes", "algorithm", "measured", "model", "off by", "lower bound",
        title=f"Allreduce between {found['workers']} workers", title_justify="left",
    )  # fmt: skip
    for row in found["exchanges"]:
        off = row["model_s"] / row["seconds"] - 1
        grid.add_row(
            f"{row['bytes']:,}",
            row["algorithm"],
            f"{row['seconds'] * 1e3:.3f} ms",
            f"{row['model_s'] * 1e3:.3f} ms",
            f"{off:+.0%}",
            f"{row['bound_s'] * 1e3:.3f} ms",
        )
    console.print(grid)
    (link,) = (Link(one["latency_s"], one["byte_s"]) for one in found["profile"].values())
    console.print(
        f"{'inside a host' if found['where'] == 'inside' else 'between hosts'}: latency {link.alpha * 1e6:.3g} us, "
        f"{1 / max(link.byte_s, 1e-15) / 1e9:.3g} GB/s",
        highlight=False,
    )
