"""The ways to spread a model's training over P workers, each as the seconds of one optimizer step and their parts.

Data parallelism in its forms (the survey's sections 6 and 7), then what splits the model instead: model parallelism
(6.2), pipelining (6.3) and hybrids (6.4). The trainer runs those with ``runs=True``; the others are counted, so that
a model for which data parallelism is the wrong tool is told so. A new way is one function and one line in `WAYS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dl_on_spark.concurrency import communication
from dl_on_spark.concurrency.communication import ALLREDUCE, Cost, Link
from dl_on_spark.concurrency.stragglers import wait
from dl_on_spark.concurrency.workload import Cluster, Workload

_MICRO_BATCHES = 8


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step over the global batch, and bytes that the busiest worker sends in it.

    ``compute``: reading included; ``exchange``: not hidden; ``waiting``: for slower workers, or a pipeline's bubble.
    ``memory``: bytes of weights, gradient, slots and activations on one worker.
    """

    compute: float
    exchange: float
    waiting: float
    bytes: float
    memory: float

    @property
    def seconds(self) -> float:
        """All of the step."""
        return self.compute + self.exchange + self.waiting


@dataclass(frozen=True)
class Way:
    """``sync``: the word of pipeline.yaml where the trainer runs it. ``step``: what it costs on P workers."""

    name: str
    step: Callable[[Workload, Cluster, int], StepTime]
    sync: str | None = None

    @property
    def runs(self) -> bool:
        """Whether the trainer runs it."""
        return self.sync is not None


def allreduce_cost(size: float, workers: int, cluster: Cluster) -> Cost:
    """As the collectives do it: in shared memory inside a host, then between one worker of each host.

    Between hosts it is the cheaper of the two algorithms among which they choose by size; the result then goes to the
    others of the host by one more copy.
    """
    if workers == 1:
        return communication.NOTHING
    hosts, inside = cluster.hosts(workers), min(workers, cluster.workers_per_host)
    within = communication.NOTHING if inside == 1 else communication.shared_memory(size, inside, cluster.inside)
    if hosts == 1:
        return within
    ring, doubling = (ALLREDUCE[name](size, hosts, cluster.between) for name in ("ring", "recursive_doubling"))
    copied = communication.NOTHING if inside == 1 else communication.broadcast(size, 2, cluster.inside)
    return within + min(ring, doubling, key=lambda cost: cost.seconds) + copied


def allreduce(ratio: float = 1.0) -> Callable[[Workload, Cluster, int], StepTime]:
    """Synchronous: every step reduces a gradient of ``ratio`` times its bytes."""

    def step(load: Workload, cluster: Cluster, workers: int) -> StepTime:
        cost = allreduce_cost(load.shape.weight_bytes * ratio, workers, cluster)
        return _data_parallel(load, cluster, workers, cost, every=1)

    return step


def local_sgd(every: int) -> Callable[[Workload, Cluster, int], StepTime]:
    """Models are averaged each ``every`` steps."""

    def step(load: Workload, cluster: Cluster, workers: int) -> StepTime:
        cost = allreduce_cost(load.shape.weight_bytes, workers, cluster)
        return _data_parallel(load, cluster, workers, communication.every(every, cost), every=every)

    return step


def gossip(load: Workload, cluster: Cluster, workers: int) -> StepTime:
    """Models are averaged with two neighbours on a ring; a worker waits for these alone."""
    neighbours = min(2, workers - 1)
    cost = communication.gossip(load.shape.weight_bytes, neighbours, cluster.link(workers))
    return _data_parallel(load, cluster, workers, cost, every=1, waits_for=1 + neighbours)


def parameter_server(load: Workload, cluster: Cluster, workers: int) -> StepTime:
    """Asynchronous, the parameters spread over the workers: nobody waits, gradients are stale."""
    cost = communication.NOTHING
    if workers > 1:
        cost = communication.parameter_server(load.shape.weight_bytes, workers, cluster.link(workers), shards=workers)
    return _data_parallel(load, cluster, workers, cost, every=1, waits_for=1)


def model_parallel(load: Workload, cluster: Cluster, workers: int) -> StepTime:
    """Each layer is split over all workers; outputs are gathered forward, gradients of inputs reduced backward."""
    return _split_layers(load, cluster, workers, load.batch)


def pipeline(load: Workload, cluster: Cluster, workers: int) -> StepTime:
    """Consecutive layers as stages; micro-batches fill them. The stage that holds the largest layer sets the pace."""
    stages, contention = workers, cluster.contention(workers)
    share = max(1 / stages, load.shape.largest_layer if stages > 1 else 1.0)
    micro = _MICRO_BATCHES if stages > 1 else 1
    busy = (load.step_s * micro + load.batch * load.row_s) * share * contention
    bubble = communication.pipeline_bubble(stages, micro)
    moved = load.batch * load.shape.boundary_bytes * (2 if stages > 1 else 0)
    link = cluster.link(workers)
    rounds = 2 * (micro + stages - 1) if stages > 1 else 0
    return StepTime(
        busy,
        rounds * link.alpha + moved * link.byte_s,
        busy * bubble / (1 - bubble),
        moved,
        _state_bytes(load) / stages + load.batch * load.shape.activation_bytes / stages,
    )


def hybrid(load: Workload, cluster: Cluster, workers: int) -> StepTime:
    """The model is split inside a host, the data between hosts."""
    inside = min(workers, cluster.workers_per_host)
    groups = max(1, workers // inside)
    within = _split_layers(load, cluster, inside, load.batch / groups)
    across = communication.NOTHING
    if groups > 1:
        share = load.shape.weight_bytes / inside
        crowded = communication.slower(cluster.between, inside)
        across = communication.best_allreduce(share, groups, crowded)[1]
    return StepTime(
        within.compute,
        within.exchange + across.seconds + (load.exchange_s if groups > 1 else 0.0),
        wait(within.compute, load.spread, groups),
        within.bytes + across.bytes,
        within.memory,
    )


WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("allreduce", allreduce(), "allreduce"),
        Way("allreduce, fp16", allreduce(0.5), "allreduce:compress=fp16"),
        Way("local SGD, every 16", local_sgd(16), "local_sgd:every=16"),
        Way("gossip on a ring", gossip, "gossip:topology=ring"),
        Way("parameter server", parameter_server),
        Way("model parallel", model_parallel),
        Way("pipeline", pipeline),
        Way("hybrid", hybrid),
    )
}


def bound(load: Workload, cluster: Cluster, workers: int) -> float:
    """Seconds of a synchronous step that none of these goes below: all cores busy, and the allreduce's lower bound."""
    cores = max(1.0, cluster.contention(workers))
    busy = load.compute_s(load.batch) / workers * cores
    if workers == 1:
        return busy
    best = Link(0.0, min(cluster.inside.byte_s, cluster.between.byte_s))
    return max(busy, communication.allreduce_bound(load.shape.weight_bytes, workers, best))


def _data_parallel(
    load: Workload, cluster: Cluster, workers: int, cost: Cost, *, every: int, waits_for: int | None = None
) -> StepTime:
    rows = load.batch / workers
    compute = load.compute_s(rows) * cluster.contention(workers)
    exchange = 0.0 if workers == 1 else cost.seconds + load.exchange_s * cluster.contention(workers) / every
    return StepTime(
        compute,
        exchange,
        wait(compute, load.spread, min(workers, waits_for or workers), every),
        cost.bytes,
        _state_bytes(load) + rows * load.shape.activation_bytes,
    )


def _split_layers(load: Workload, cluster: Cluster, workers: int, rows: float) -> StepTime:
    compute = (load.step_s + rows * load.row_s / workers) * cluster.contention(workers)
    size = rows * load.shape.exchanged_bytes
    cost = communication.NOTHING
    if workers > 1:
        link = cluster.link(workers)
        gathered = communication.allgather(size, workers, link)
        reduced = ALLREDUCE["ring"](size, workers, link)
        cost = gathered + reduced
    memory = _state_bytes(load) / workers + rows * load.shape.activation_bytes
    return StepTime(compute, cost.seconds, wait(compute, load.spread, workers), cost.bytes, memory)


def _state_bytes(load: Workload) -> float:
    """Weights, gradient and the optimizer's slots."""
    return float(load.shape.weight_bytes * (2 + load.shape.slots))
