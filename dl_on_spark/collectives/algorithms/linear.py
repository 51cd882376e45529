"""Linear: rank 0 (or the root) talks to each rank in turn; the baseline others are measured by."""

from __future__ import annotations

from dl_on_spark.collectives.schedule import Schedule, Span, Step, Steps


def allreduce(rank: int, world_size: int, n: int) -> Schedule:
    """Rank 0 adds the ranks' values in order and sends the result to each."""
    if rank:
        return Schedule((Step(Span(0, 0, n), None),), (0, 0), broadcast(rank, world_size, n, 0))
    reduce = tuple(Step(None, Span(peer, 0, n), True) for peer in range(1, world_size))
    return Schedule(reduce, (0, n), broadcast(rank, world_size, n, 0))


def broadcast(rank: int, world_size: int, n: int, root: int) -> Steps:
    """The root sends to each rank in turn."""
    if rank != root:
        return (Step(None, Span(root, 0, n)),)
    return tuple(Step(Span(peer, 0, n), None) for peer in range(world_size) if peer != root)
