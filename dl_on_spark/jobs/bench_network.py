"""`dl-on-spark bench network`: what an exchange between the tasks of this cluster takes, by size."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid

from dl_on_spark.concurrency.communication import EXCHANGES, Link, allreduce_bound
from dl_on_spark.concurrency.fit import fit_link
from dl_on_spark.jobs.session import spark_session
from dl_on_spark.launch import LaunchRequest, launch, preflight

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    link = fit_exchanges(said)
    where, partners = partners_of(said)
    rows = [
        {
            "bytes": size,
            "seconds": seconds,
            "model_s": EXCHANGES[way](size, partners, link).seconds,
            "bound_s": allreduce_bound(size, partners, link),
            "algorithm": way,
        }
        for size, seconds, way in said[0]["exchanges"]
    ]
    profile = {where: {"latency_s": link.latency_s, "byte_s": link.byte_s}}
    return {"workers": workers, "where": where, "profile": profile, "exchanges": rows}


def partners_of(said: list[dict[str, Any]]) -> tuple[str, int]:
    """The link that the exchanges took, "inside" a host or "between" hosts, and how many exchanged over it."""
    hosts = len({one["host"] for one in said})
    return ("inside", len(said)) if hosts == 1 else ("between", hosts)


def fit_exchanges(said: list[dict[str, Any]]) -> Link:
    """The link under which the exchanges that the workers tell of take their time.

    Inside one host it is that host's memory; with several hosts, that between them: what their workers add inside
    is counted to it.
    """
    exchanges = said[0]["exchanges"]
    _, partners = partners_of(said)
    points = [(int(size), float(seconds)) for size, seconds, _ in exchanges]
    return fit_link(points, partners, [way for *_, way in exchanges])


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
