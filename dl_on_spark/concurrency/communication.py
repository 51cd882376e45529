"""What it costs P workers to combine S bytes: the survey's section 2.4 and what came after it, as functions.

A message of S bytes takes ``L + S G``: the latency-bandwidth (alpha-beta) model, L in seconds and G in seconds per
byte. With LogGP's overhead o at both ends (Alexandrov et al., SPAA 1995), L stands for ``L + 2 o``. ``lg`` is the
base-2 logarithm; where P is no power of two, the formulas take it as it is, as the survey prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

AT_ONCE_BYTES = 128 << 10
"""Where workers that share memory change from few steps to few bytes (``collectives.shared``)."""


@dataclass(frozen=True)
class Link:
    """One connection: ``latency_s`` (L), ``byte_s`` (G), LogGP's ``overhead_s`` (o, at each end), and ``add_s``, what
    it takes to add one byte's share of two arrays (the reduction's own work, left out of the survey's formulas)."""

    latency_s: float
    byte_s: float
    overhead_s: float = 0.0
    add_s: float = 0.0

    @classmethod
    def of(cls, *, latency_us: float, gigabits: float) -> Link:
        """A link as its makers describe it: microseconds, and 10⁹ bits per second."""
        return cls(latency_us * 1e-6, 8 / (gigabits * 1e9))

    @property
    def alpha(self) -> float:
        """Seconds of an empty message."""
        return self.latency_s + 2 * self.overhead_s


@dataclass(frozen=True)
class Cost:
    """``seconds`` on the critical path; ``messages`` and ``bytes`` that the busiest worker sends."""

    seconds: float
    messages: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(self.seconds + other.seconds, self.messages + other.messages, self.bytes + other.bytes)


NOTHING = Cost(0.0, 0.0, 0.0)


def linear(size: float, world: int, link: Link) -> Cost:
    """All to one, one after the other: ``(P - 1)(L + S G)``; sending the sum back is one more message a worker."""
    return _cost(link, rounds=world - 1, moved=(world - 1) * size, added=(world - 1) * size)


def tree(size: float, world: int, link: Link) -> Cost:
    """Reduction up a binomial tree and broadcast down: ``2 lg P (L + S G)``."""
    lg = math.log2(world)
    return _cost(link, rounds=2 * lg, moved=2 * lg * size, added=lg * size)


def butterfly(size: float, world: int, link: Link) -> Cost:
    """Recursive doubling: ``lg P (L + S G)``."""
    lg = math.log2(world)
    return _cost(link, rounds=lg, moved=lg * size, added=lg * size)


def ring(size: float, world: int, link: Link) -> Cost:
    """Reduce-scatter and allgather around a ring: ``2 (P - 1) L + 2 S G (P - 1)/P``."""
    share = size * (world - 1) / world
    return _cost(link, rounds=2 * (world - 1), moved=2 * share, added=share)


def rabenseifner(size: float, world: int, link: Link) -> Cost:
    """Recursive halving and doubling (Rabenseifner, 2004): ``2 lg P L + 2 S G (P - 1)/P``."""
    share = size * (world - 1) / world
    return _cost(link, rounds=2 * math.log2(world), moved=2 * share, added=share)


Allreduce = Callable[[float, int, Link], Cost]
ALLREDUCE: dict[str, Allreduce] = {
    "linear": linear,
    "tree": tree,
    "recursive_doubling": butterfly,
    "ring": ring,
    "rabenseifner": rabenseifner,
}


def shared_memory(size: float, world: int, link: Link) -> Cost:
    """Workers of one host, in memory that they share.

    Up to `AT_ONCE_BYTES` over all, each reads all of everyone, ``L + (P - 1) S G``; more than that, each reduces its
    share and takes the others' results, ``2 L + 2 S G (P - 1)/P``.
    """
    if size * world <= AT_ONCE_BYTES:
        return _cost(link, rounds=1, moved=(world - 1) * size, added=(world - 1) * size)
    share = size * (world - 1) / world
    return _cost(link, rounds=2, moved=2 * share, added=share)


EXCHANGES: dict[str, Allreduce] = {**ALLREDUCE, "shared_memory": shared_memory}
"""By the name under which the collectives tell what carried an allreduce."""


def best_allreduce(size: float, world: int, link: Link) -> tuple[str, Cost]:
    """The algorithm that is cheapest for this size, and its cost."""
    costs = {name: algorithm(size, world, link) for name, algorithm in ALLREDUCE.items()}
    name = min(costs, key=lambda one: costs[one].seconds)
    return name, costs[name]


def allreduce_bound(size: float, world: int, link: Link, *, redundant: bool = False) -> float:
    """Seconds that no allreduce beats: ``lg P L + 2 S G (P - 1)/P``.

    ``redundant``: the bound ``lg P L + S G (P - 1)/P`` that also holds when workers may repeat each other's additions.
    """
    return math.log2(world) * link.alpha + (1 if redundant else 2) * size * link.byte_s * (world - 1) / world


def reduce_scatter(size: float, world: int, link: Link) -> Cost:
    """Recursive halving: ``lg P L + S G (P - 1)/P``."""
    share = size * (world - 1) / world
    return _cost(link, rounds=math.log2(world), moved=share, added=share)


def allgather(size: float, world: int, link: Link) -> Cost:
    """Recursive doubling, ``size`` bytes in all at the end: ``lg P L + S G (P - 1)/P``."""
    return _cost(link, rounds=math.log2(world), moved=size * (world - 1) / world)


def broadcast(size: float, world: int, link: Link) -> Cost:
    """A binomial tree: ``lg P (L + S G)``."""
    lg = math.log2(world)
    return _cost(link, rounds=lg, moved=lg * size)


def parameter_server(size: float, world: int, link: Link, *, shards: int = 1) -> Cost:
    """Gradients to ``s`` servers and weights back: ``2 P S G / s + 2 L``; the servers' links are the bottleneck."""
    seconds = 2 * world * size * link.byte_s / shards + 2 * link.alpha + world * size / shards * link.add_s
    return Cost(seconds, 2.0 * shards, size)


def sparse_allreduce(entries: int, world: int, link: Link, *, value_bytes: int = 4, index_bytes: int = 4) -> Cost:
    """An allgather of ``entries`` values with their places from each: ``lg P L + (P - 1) k (b_val + b_idx) G``."""
    moved = (world - 1) * entries * (value_bytes + index_bytes)
    return _cost(link, rounds=math.log2(world), moved=moved, added=moved)


def hierarchical(size: float, hosts: int, per_host: int, inside: Link, between: Link) -> Cost:
    """Reduce-scatter inside each host, allreduce of the shares between hosts, allgather inside."""
    within = reduce_scatter(size, per_host, inside) + allgather(size, per_host, inside)
    return within + best_allreduce(size / per_host, hosts, between)[1]


def gossip(size: float, neighbours: int, link: Link) -> Cost:
    """The whole model to each neighbour and theirs back, full duplex: ``d (L + S G)``, whatever P is."""
    return _cost(link, rounds=neighbours, moved=neighbours * size, added=neighbours * size)


def every(steps: int, cost: Cost) -> Cost:
    """A step's share of an exchange that comes after so many local steps."""
    return Cost(cost.seconds / steps, cost.messages / steps, cost.bytes / steps)


def exposed(buckets: list[float], backward_s: float, exchange: Callable[[float], float]) -> float:
    """Seconds of communication that the backward pass does not hide.

    ``buckets``: bytes of each, in the order in which their gradients are ready, evenly over ``backward_s``;
    ``exchange``: seconds of a bucket's exchange. Exchanges follow each other, none before its gradients are there.
    """
    end = 0.0
    for number, size in enumerate(buckets, start=1):
        end = max(end, backward_s * number / len(buckets)) + exchange(size)
    return max(0.0, end - backward_s)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of the time in which a stage of a pipeline waits: ``(S - 1)/(M + S - 1)``."""
    return (stages - 1) / (micro_batches + stages - 1)


def slower(link: Link, factor: float) -> Link:
    """The link when ``factor`` workers of one host share it."""
    return replace(link, byte_s=link.byte_s * factor)


def _cost(link: Link, *, rounds: float, moved: float, added: float = 0.0) -> Cost:
    return Cost(rounds * link.alpha + moved * link.byte_s + added * link.add_s, rounds, moved)
