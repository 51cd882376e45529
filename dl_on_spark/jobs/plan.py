"""The plan job: measures a step on real workers, and says what more of them would bring, before they are booked."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid

from dl_on_spark.concurrency import WAYS, Cluster, Link, Plan, Shape, Workload, batches, plan
from dl_on_spark.concurrency.fit import two_parts
from dl_on_spark.concurrency.stragglers import wait
from dl_on_spark.concurrency.ways import allreduce_cost
from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import ConfigError
from dl_on_spark.jobs.bench_network import fit_exchanges
from dl_on_spark.jobs.days import DaySplit, day_tables
from dl_on_spark.lake import Schema, Snapshot, compute_statistics
from dl_on_spark.launch import LaunchRequest, launch, preflight

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ENTRY = "dl_on_spark.training.measure:run"
ASSUMED = Link.of(latency_us=50, gigabits=10)
_SMALL_BATCHES = (1, 4, 16)  # the global batch over these, on one worker


@dataclass(frozen=True)
class Measured:
    """What real workers said: the workload and the cluster of the plan, and where each number comes from."""

    workload: Workload
    cluster: Cluster
    facts: dict[str, str]


def run(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    *,
    workers: Sequence[int],
    batch: Sequence[int] = (),
    network: Path | None = None,
    workers_per_host: int | None = None,
    price_per_hour: float = 0.0,
    failures_per_hour: float = 0.0,
    noise_scale: float | None = None,
    output: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure, plan for each global batch, show, and draw to `output`; returns the plans as plain values."""
    sizes = batch or [config.training.global_batch_size]
    if min(workers) > min(sizes):
        raise ConfigError(
            f"plan: a global batch of {min(sizes)} rows is too small for {min(workers)} workers.",
            fix="Mend --workers or --batch.",
        )
    found = measure(spark, config, date)
    cluster = replace(
        found.cluster,
        workers_per_host=workers_per_host or found.cluster.workers_per_host,
        price_per_hour=price_per_hour,
        failures_per_hour=failures_per_hour,
    )
    facts = dict(found.facts)
    if network is not None:
        cluster, facts["network"] = with_profile(cluster, network), f"from {network}"
    workload = replace(found.workload, noise_scale=noise_scale)
    loads = batches(workload, sizes)
    plans = [plan(load, cluster, workers) for load in loads]
    best, load = min(zip(plans, loads, strict=True), key=lambda pair: pair[0].chosen.seconds)
    if not quiet:
        show(plans, facts, Console())
    if output is not None:
        from dl_on_spark.report.plan_plot import draw_plan

        draw_plan(output, best, cluster, load)
    return {
        "recommendation": best.reason,
        "sync": best.chosen.sync,
        "workers": best.chosen.workers,
        "global_batch_size": best.chosen.batch,
        "seconds": best.chosen.seconds,
        **({} if best.data_cost is None else {"rows_for_the_same_loss": f"{best.data_cost:.2f} times a small batch's"}),
        "measured": facts,
        "plans": [one.as_dict() for one in plans],
        **({} if output is None else {"plot": str(output)}),
    }


def measure(spark: SparkSession, config: PipelineConfig, date: datetime.date) -> Measured:
    """Time steps on one worker at several batch sizes, then on ``training.num_workers`` together, and their network."""
    training = config.training
    snapshot, job = training_data(spark, config, date)
    most = min(snapshot.rows, training.global_batch_size)
    sizes = sorted({max(1, most // part) for part in _SMALL_BATCHES}, reverse=True)
    alone = time_steps(spark, config, 1, [(size, "allreduce") for size in sizes], job)
    count = max(2, training.num_workers)
    far = "local_sgd:every=1000000"
    together = time_steps(spark, config, count, [(max(count, most), far), (max(count, most), "allreduce")], job)
    return _measured(config, snapshot, alone[0], together)


def training_data(spark: SparkSession, config: PipelineConfig, date: datetime.date) -> tuple[Snapshot, dict[str, Any]]:
    """The training days' rows, pinned; and with schema and statistics as `training.measure.MeasureJob` takes them."""
    train_rows, _ = day_tables(config, DaySplit.of(config, date))
    snapshot = train_rows.snapshot(spark)
    schema = Schema.load(config.schema_path())
    schema.check(snapshot.schema, snapshot.uri, schema.feed_columns)
    statistics = compute_statistics(spark, snapshot, schema)
    job = {"snapshot": snapshot.to_json(), "schema": schema.to_dict(), "statistics": statistics.to_json()}
    return snapshot, job


def time_steps(
    spark: SparkSession, config: PipelineConfig, workers: int, cases: Sequence[tuple[int, str]], data: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each of so many workers says of the cases, ``(global batch, sync)``, on the data of `training_data`."""
    training = config.training
    job = {"model": training.model, "cases": tuple(cases), **data}
    preflight(spark, workers, gpus_per_worker=training.gpus_per_worker, cpus_per_worker=training.cpus_per_worker)
    request = LaunchRequest(
        num_workers=workers,
        entry=ENTRY,
        payload=pickle.dumps(job),
        gpus_per_worker=training.gpus_per_worker,
        cpus_per_worker=training.cpus_per_worker,
        deadline_s=training.deadline_s,
    )
    return launch(spark, request, lambda _message: None)


def _measured(
    config: PipelineConfig, snapshot: Snapshot, alone: dict[str, Any], together: list[dict[str, Any]]
) -> Measured:
    steps = alone["timed"]
    step_s, row_s = two_parts([1.0] * len(steps), [s["rows"] for s in steps], [s["seconds"] for s in steps])
    hosts = {one["host"] for one in together}
    count = len(together)
    per_host = max(sum(one["host"] == host for one in together) for host in hosts)
    cores = int(together[0]["cores"])
    local, exchanging = (max(one["timed"][case]["seconds"] for one in together) for case in (0, 1))
    # Workers share more than cores (memory, caches): what the ones of a host were seen to cost each other counts.
    crowding = local / (step_s + together[0]["timed"][0]["rows"] * row_s)
    threads = max(*(step["busy"] for step in steps), crowding * cores / per_host)
    link = fit_exchanges(together)
    known = alone["shape"]
    shape = Shape(**known or {})
    cluster = Cluster(
        workers_per_host=per_host,
        cores=cores,
        threads=threads,
        inside=link if len(hosts) == 1 else ASSUMED,
        between=link if len(hosts) > 1 else ASSUMED,
    )
    # What allreduce adds to a step is the link's time, then waiting, as far as steps were seen to vary, then the way
    # out of TensorFlow and back.
    added = max(0.0, exchanging - local - allreduce_cost(shape.weight_bytes, count, cluster).seconds)
    spread = max(one["timed"][0]["spread"] for one in together)
    spread = min(spread, added / wait(local, 1.0, count))
    workload = Workload(
        rows=snapshot.rows,
        epochs=config.training.epochs,
        batch=config.training.global_batch_size,
        step_s=step_s,
        row_s=row_s,
        shape=shape,
        spread=spread,
        exchange_s=max(0.0, added - wait(local, spread, count)) / cluster.contention(count),
    )
    facts = {
        "rows of an epoch": f"{snapshot.rows:,}",
        "a step, measured on one worker": f"{step_s * 1e3:.3g} ms + {row_s * 1e6:.3g} us a row",
        "workers on a host": f"{per_host}; more workers take more hosts of this kind",
        "cores that a worker takes": f"{threads:.2f} of {cores}",
        f"a step on {count} workers, no exchange": f"{local * 1e3:.3g} ms",
        f"a step on {count} workers, allreduce": f"{exchanging * 1e3:.3g} ms",
        "spread of a step": f"{spread:.0%}",
        "gradient": f"{shape.weight_bytes:,} bytes" if known else "not known: a subclassed model",
        f"network, measured {'on one host' if len(hosts) == 1 else 'between hosts'}": _link_text(link),
        f"network, assumed {'between hosts' if len(hosts) == 1 else 'inside a host'}": _link_text(ASSUMED),
    }
    return Measured(workload, cluster, facts)


def show(plans: Sequence[Plan], facts: dict[str, str], console: Console) -> None:
    """Tables of what was measured and of each plan."""
    grid = Grid(title="Measured", show_header=False, title_justify="left", title_style="bold")
    for name, value in facts.items():
        grid.add_row(name, value)
    console.print(grid)
    for one in plans:
        rows = f"{one.chosen.batch:,} rows a step"
        for runs, title in ((True, "Rows/s and efficiency"), (False, "Counted, not run by the trainer")):
            names = [name for name, way in WAYS.items() if way.runs == runs]
            table = Grid("workers", *names, title=f"{title}, {rows}", title_justify="left")
            for estimates in zip(*(one.of(name) for name in names), strict=True):
                cells = [f"{e.rows_per_second:,.0f} {e.efficiency:4.0%}" for e in estimates]
                table.add_row(f"{estimates[0].workers:,}", *cells)
            console.print(table)


def with_profile(cluster: Cluster, network: Path) -> Cluster:
    """The links that `bench network` wrote."""
    try:
        profile = dict(json.loads(network.read_text()))
        links = {name: Link(float(one["latency_s"]), float(one["byte_s"])) for name, one in profile.items()}
        if not links or not links.keys() <= {"inside", "between"}:
            raise ValueError("it must have inside, between, or both")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--network {network}: not a network profile ({error}).", fix="Make one with dl-on-spark bench network."
        ) from error
    return replace(cluster, inside=links.get("inside", cluster.inside), between=links.get("between", cluster.between))


def _link_text(link: Link) -> str:
    return f"{link.alpha * 1e6:.3g} us + {1 / max(link.byte_s, 1e-15) / 1e9:.3g} GB/s"
