"""Rabenseifner: recursive halving, then recursive doubling; 2 log2(p) steps, 2n(p − 1)/p elements.

Thakur, Rabenseifner, Gropp 2005, section 4.5.
"""

from __future__ import annotations

from dl_on_spark.collectives.schedule import Fold, Schedule, Span, Step, block_bounds


def allreduce(rank: int, world_size: int, n: int) -> Schedule:
    """Halve the span at each step until one block is left, then retrace the steps."""
    fold = Fold(rank, world_size)
    place = fold.place
    if place is None:
        return fold.wrap(n, (), (0, 0), ())
    bounds = block_bounds(n, fold.size)
    low, high = 0, fold.size
    reduce: list[Step] = []
    gather: list[Step] = []
    distance = fold.size // 2
    while distance:
        peer, middle = fold.rank_at(place ^ distance), low + distance
        keep, give = ((low, middle), (middle, high)) if place < middle else ((middle, high), (low, middle))
        kept = Span(peer, bounds[keep[0]], bounds[keep[1]])
        given = Span(peer, bounds[give[0]], bounds[give[1]])
        reduce.append(Step(given, kept, True))
        gather.append(Step(kept, given))
        low, high = keep
        distance //= 2
    return fold.wrap(n, tuple(reduce), (bounds[low], bounds[high]), tuple(reversed(gather)))
