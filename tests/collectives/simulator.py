"""Carries out the schedules of all ranks in memory, with rendezvous semantics (nothing is buffered).

A half of a step ends when the peer stands at the matching half of its own current step, so a
schedule that needs buffering to go on is found as a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dl_on_spark.collectives.schedule import Step


def carry_out(steps: Sequence[Sequence[Step]], values: Sequence[np.ndarray], combine: Callable) -> list[int]:
    """Run ``steps[rank]`` on ``values[rank]`` in place; returns the elements each rank sent."""
    world_size = len(steps)
    at, sent = [0] * world_size, [0] * world_size
    begun: list[dict] = [{} for _ in steps]

    def current(rank: int) -> dict:
        while at[rank] < len(steps[rank]):
            if not begun[rank]:
                step = steps[rank][at[rank]]
                halves = {"send": step.send, "receive": step.receive, "step": step}
                halves["outgoing"] = values[rank][slice(*step.send[1:])].copy() if step.send else None
                begun[rank] = halves
            if begun[rank]["send"] is None and begun[rank]["receive"] is None:
                at[rank] += 1
                begun[rank] = {}
                continue
            return begun[rank]
        return {"send": None, "receive": None}

    moved = True
    while moved:
        moved = False
        for rank in range(world_size):
            mine = current(rank)
            if mine["send"] is None:
                continue
            peer = mine["send"].peer
            theirs = current(peer)
            into = theirs["receive"]
            if into is None or into.peer != rank:
                continue
            assert into.stop - into.start == len(mine["outgoing"]), "the two ends disagree on the size"
            target = values[peer][into.start : into.stop]
            if theirs["step"].reduce:
                left, right = (mine["outgoing"], target) if rank < peer else (target, mine["outgoing"])
                combine(left, right, out=target)
            else:
                target[:] = mine["outgoing"]
            sent[rank] += len(mine["outgoing"])
            mine["send"] = theirs["receive"] = None
            moved = True
    stuck = [rank for rank in range(world_size) if at[rank] < len(steps[rank])]
    assert not stuck, f"ranks {stuck} wait for each other"
    return sent
