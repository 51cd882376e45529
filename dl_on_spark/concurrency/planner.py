"""The planner: what each way of training would cost on so many workers, and which one to take.

Strong scaling: the global batch stays, so the optimizer takes the same steps on any number of workers, and a plan's
rows per second are the batch over the seconds of a step. A larger batch takes fewer steps an epoch but more epochs:
with a gradient noise scale B_noise, the rows needed for the same loss grow by ``1 + B / B_noise`` (McCandlish et al.,
2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dl_on_spark.concurrency.stragglers import with_failures
from dl_on_spark.concurrency.ways import WAYS, StepTime, bound
from dl_on_spark.concurrency.workload import Cluster, Workload

_WORTH = 0.5  # efficiency below which another worker is not worth its cost
_CLEARLY = 1.10  # as much faster must a way be to be preferred to a simpler one
_WRONG_TOOL = 1.5  # as much faster must a way be that splits the model to be named


@dataclass(frozen=True)
class Estimate:
    """One way on ``workers`` workers. ``efficiency``: of the speed that one worker times P would have.

    ``seconds``: expected until all epochs are done, failures included. ``price``: of these. ``of_bound``:
    the step's lower bound over its time.
    """

    way: str
    sync: str | None
    workers: int
    batch: int
    step: StepTime
    step_s: float
    rows_per_second: float
    efficiency: float
    of_bound: float
    seconds: float
    price: float


@dataclass(frozen=True)
class Plan:
    """All estimates, the one to take, and why. ``data_cost``: rows needed for the same loss, over those that the
    smallest batch would need; None where the noise scale is not known."""

    estimates: tuple[Estimate, ...]
    chosen: Estimate
    reason: str
    data_cost: float | None

    def of(self, way: str) -> list[Estimate]:
        """One way's estimates, by number of workers."""
        return sorted((e for e in self.estimates if e.way == way), key=lambda e: e.workers)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def plan(
    workload: Workload,
    cluster: Cluster,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    ways: Sequence[str] = tuple(WAYS),
) -> Plan:
    """Estimate `ways` on each of `workers`. Raises ValueError for a number below 1, none at all, or an unknown way.

    More workers than rows in the global batch are left out: some would have no rows in a step.
    """
    if not workers or min(workers) < 1:
        raise ValueError(f"workers={list(workers)}: give numbers of at least 1.")
    unknown = [name for name in ways if name not in WAYS]
    if unknown:
        raise ValueError(f"way {unknown[0]!r} is unknown; known: {', '.join(WAYS)}.")
    counts = sorted({count for count in workers if count <= workload.batch})
    if not counts:
        raise ValueError(f"a global batch of {workload.batch} rows is too small for {min(workers)} workers.")
    estimates = tuple(estimate(name, workload, cluster, count) for name in ways for count in counts)
    chosen, reason = _choose(estimates)
    noise = workload.noise_scale
    return Plan(estimates, chosen, reason, None if noise is None else 1 + workload.batch / noise)


def estimate(way: str, workload: Workload, cluster: Cluster, workers: int) -> Estimate:
    """One way on so many workers."""
    step = WAYS[way].step(workload, cluster, workers)
    alone = workload.compute_s(workload.batch)
    running = workload.epochs * workload.steps * step.seconds
    interval = workload.steps * step.seconds  # an epoch's end always has a checkpoint
    seconds = with_failures(running, workers, cluster.failures_per_hour, interval, cluster.restart_s)
    return Estimate(
        way=way,
        sync=WAYS[way].sync,
        workers=workers,
        batch=workload.batch,
        step=step,
        step_s=step.seconds,
        rows_per_second=workload.batch / step.seconds,
        efficiency=alone / step.seconds / workers,
        of_bound=bound(workload, cluster, workers) / step.seconds,
        seconds=seconds,
        price=seconds / 3600 * workers * cluster.price_per_hour,
    )


def batches(workload: Workload, sizes: Sequence[int]) -> list[Workload]:
    """The same run with other global batches; where the noise scale is known, with the epochs that they need."""
    found = []
    for size in sizes:
        epochs = float(workload.epochs)
        if workload.noise_scale is not None:
            epochs *= (1 + size / workload.noise_scale) / (1 + workload.batch / workload.noise_scale)
        found.append(replace(workload, batch=size, epochs=math.ceil(epochs)))
    return found


def _choose(estimates: tuple[Estimate, ...]) -> tuple[Estimate, str]:
    """The fastest that is worth its workers; of almost equal ones the one with fewer workers, then the first way."""
    running = [e for e in estimates if e.sync is not None] or list(estimates)
    worth = [e for e in running if e.efficiency >= _WORTH] or [min(running, key=lambda e: e.workers)]
    fastest = min(e.seconds for e in worth)
    order = list(WAYS)
    chosen = min((e for e in worth if e.seconds <= fastest * _CLEARLY), key=lambda e: (e.workers, order.index(e.way)))
    reason = (
        f"Take {chosen.way} on {_workers(chosen.workers)}: {chosen.rows_per_second:,.0f} rows/s, "
        f"{chosen.efficiency:.0%} of {chosen.workers} times one worker; {_wall(chosen, running)}."
    )
    split = [e for e in estimates if e.sync is None and e.way in {"model parallel", "pipeline", "hybrid"}]
    better = min(split, key=lambda e: e.step_s, default=None)
    data = min(running, key=lambda e: e.step_s)
    if better is not None and better.step_s * _WRONG_TOOL < data.step_s:
        reason += (
            f" Data parallelism is the wrong tool for this model: {better.way} on {better.workers} workers would take "
            f"{_ms(better.step_s)} a step, the best data-parallel way {_ms(data.step_s)}."
        )
    return chosen, reason


def _wall(chosen: Estimate, running: list[Estimate]) -> str:
    """Why not more workers."""
    more = [e for e in running if e.way == chosen.way and e.workers > chosen.workers]
    if not more:
        return "more workers were not asked for"
    after = min(more, key=lambda e: e.workers)
    parts = {
        "the fixed part of a step and shared cores": after.step.compute
        - chosen.step.compute * chosen.workers / after.workers,
        "the exchange": after.step.exchange - chosen.step.exchange * chosen.workers / after.workers,
        "waiting for the slowest": after.step.waiting - chosen.step.waiting * chosen.workers / after.workers,
    }
    cause = max(parts, key=lambda name: parts[name])
    return f"{after.workers} would reach {after.efficiency:.0%}, held back most by {cause}"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms"
