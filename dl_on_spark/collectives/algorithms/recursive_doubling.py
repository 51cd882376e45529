"""Recursive doubling (butterfly): log2(p) steps of the whole message; best for small ones."""

from __future__ import annotations

from dl_on_spark.collectives.schedule import Fold, Schedule, Span, Step


def allreduce(rank: int, world_size: int, n: int) -> Schedule:
    """Pairs at distance 1, 2, 4, ... exchange everything; both sides compute the same sum."""
    fold = Fold(rank, world_size)
    steps: list[Step] = []
    if fold.place is not None:
        distance = 1
        while distance < fold.size:
            whole = Span(fold.rank_at(fold.place ^ distance), 0, n)
            steps.append(Step(whole, whole, True))
            distance *= 2
    return fold.wrap(n, tuple(steps), (0, n), ())
