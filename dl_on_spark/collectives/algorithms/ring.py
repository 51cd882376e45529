"""Ring: bandwidth-optimal, 2(p − 1) steps of n/p elements (Patarasuk and Yuan 2009).

With two ranks it is the direct exchange of halves.
"""

from __future__ import annotations

from collections.abc import Sequence

from dl_on_spark.collectives.schedule import Schedule, Span, Step, Steps, block_bounds


def allreduce(rank: int, world_size: int, n: int) -> Schedule:
    """Reduce-scatter, then allgather, both around the ring."""
    bounds = block_bounds(n, world_size)
    return Schedule(reduce_scatter(rank, bounds), (bounds[rank], bounds[rank + 1]), allgather(rank, bounds))


def reduce_scatter(rank: int, bounds: Sequence[int]) -> Steps:
    """Rank r ends with block r reduced; each block is summed along one chain of ranks."""
    return _turns(rank, bounds, ahead=1, reduce=True)


def allgather(rank: int, bounds: Sequence[int]) -> Steps:
    """Rank r starts with block r (blocks may differ in size) and ends with all of them."""
    return _turns(rank, bounds, ahead=0, reduce=False)


def _turns(rank: int, bounds: Sequence[int], *, ahead: int, reduce: bool) -> Steps:
    size = len(bounds) - 1
    right, left = (rank + 1) % size, (rank - 1) % size
    steps = []
    for turn in range(size - 1):
        out, into = (rank - turn - ahead) % size, (rank - turn - ahead - 1) % size
        steps.append(
            Step(Span(right, bounds[out], bounds[out + 1]), Span(left, bounds[into], bounds[into + 1]), reduce)
        )
    return tuple(steps)
