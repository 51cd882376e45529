"""Pairwise exchange: in turn t every rank sends to the one t places on and hears from the one t places back."""

from __future__ import annotations

from dl_on_spark.collectives.schedule import Span, Step, Steps


def alltoall(rank: int, world_size: int, n: int) -> Steps:
    """Rank r's block for rank q, elements ``q n`` on, comes to q's place ``(P + r) n``; P - 1 steps of n elements.

    The buffer has ``2 P n`` elements: what goes, then what comes.
    """
    steps = []
    for turn in range(1, world_size):
        to, of = (rank + turn) % world_size, (rank - turn) % world_size
        steps.append(Step(Span(to, to * n, (to + 1) * n), Span(of, (world_size + of) * n, (world_size + of + 1) * n)))
    return tuple(steps)
