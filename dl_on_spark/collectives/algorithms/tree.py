"""Binomial tree: log2(p) steps of the whole message, at each step twice as many ranks know it."""

from __future__ import annotations

from dl_on_spark.collectives.schedule import Schedule, Span, Step, Steps


def allreduce(rank: int, world_size: int, n: int) -> Schedule:
    """Reduce up the tree to rank 0, then broadcast down the same tree."""
    parent, children = _family(rank, world_size)
    up = [Step(None, Span(child, 0, n), True) for child in reversed(children)]
    if parent is not None:
        up.append(Step(Span(parent, 0, n), None))
    return Schedule(tuple(up), (0, n) if parent is None else (0, 0), broadcast(rank, world_size, n, 0))


def broadcast(rank: int, world_size: int, n: int, root: int) -> Steps:
    """Receive from the parent, then send to the children, the largest subtree first."""
    parent, children = _family((rank - root) % world_size, world_size)
    steps = [] if parent is None else [Step(None, Span((parent + root) % world_size, 0, n))]
    steps += [Step(Span((child + root) % world_size, 0, n), None) for child in children]
    return tuple(steps)


def barrier(rank: int, world_size: int) -> Steps:
    """Dissemination barrier of empty messages (Hensgen, Finkel, Manber 1988): log2(p) rounds."""
    steps = []
    distance = 1
    while distance < world_size:
        to, source = (rank + distance) % world_size, (rank - distance) % world_size
        steps.append(Step(Span(to, 0, 0), Span(source, 0, 0)))
        distance *= 2
    return tuple(steps)


def _family(place: int, world_size: int) -> tuple[int | None, list[int]]:
    """Parent (None at the root) and children of a place, the largest subtree first."""
    lowest = place & -place if place else 1 << world_size.bit_length()
    children = []
    distance = lowest >> 1
    while distance:
        if place + distance < world_size:
            children.append(place + distance)
        distance >>= 1
    return (place - lowest if place else None), children
