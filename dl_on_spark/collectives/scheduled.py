"""Collectives as schedules, carried out step by step over the TCP backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dl_on_spark.collectives.algorithms import BROADCAST, pairwise, ring, tree
from dl_on_spark.collectives.choice import allreduce_schedule
from dl_on_spark.collectives.reduction import OPERATIONS, Array, finish
from dl_on_spark.collectives.schedule import Span, Steps, block_bounds
from dl_on_spark.collectives.sink import Reduce, Replace, Sink, scratch_elements
from dl_on_spark.collectives.tcp import Backend
from dl_on_spark.collectives.wire import Call


class Scheduled:
    """This rank among ``members`` (ascending ranks); a schedule's rank i is ``members[i]``.

    ``values`` and ``octets`` are flat arrays, changed in place; a mean divides by ``mean_of``.
    """

    schedules = True

    def __init__(self, backend: Backend, rank: int, members: Sequence[int], mean_of: int) -> None:
        self._backend = backend
        self._members = members
        self.place = members.index(rank)
        self.size = len(members)
        self._mean_of = mean_of
        self._scratch: dict[str, Array] = {}

    def allreduce(self, call: Call, values: Array) -> None:
        """Combine ``values`` over all, by ``call.algorithm``."""
        schedule = allreduce_schedule(call.algorithm, self.place, self.size, values.size)
        self._carry_out(call, schedule.reduce, values)
        start, stop = schedule.owned
        finish(values[start:stop], call.op, self._mean_of)
        self._carry_out(call, schedule.gather, values)

    def reduce_scatter(self, call: Call, values: Array) -> None:
        """This place's block (``block_bounds``) becomes the result, the rest is undefined."""
        bounds = block_bounds(values.size, self.size)
        self._carry_out(call, ring.reduce_scatter(self.place, bounds), values)
        finish(values[bounds[self.place] : bounds[self.place + 1]], call.op, self._mean_of)

    def broadcast(self, call: Call, octets: Array) -> None:
        """The bytes of ``call.root`` to all."""
        steps = BROADCAST[call.algorithm](self.place, self.size, octets.size, call.root)
        self._carry_out(call, steps, octets)

    def allgather(self, call: Call, octets: Array, bounds: Sequence[int]) -> None:
        """Each place fills its block and gets all others; blocks may differ in size."""
        self._carry_out(call, ring.allgather(self.place, bounds), octets)

    def alltoall(self, call: Call, both: Array) -> None:
        """Blocks of the first half go to the other places, blocks of the second half come from them."""
        nbytes = both.size // (2 * self.size)
        self._carry_out(call, pairwise.alltoall(self.place, self.size, nbytes), both)

    def barrier(self, call: Call) -> None:
        """Return when all have called."""
        self._carry_out(call, tree.barrier(self.place, self.size), np.empty(0, np.uint8))

    def _carry_out(self, call: Call, steps: Steps, values: Array) -> None:
        """Carry the steps of ``call`` out on the flat array ``values``."""
        octets = values.view(np.uint8).data
        size = values.itemsize
        for send, receive, reduce in steps:
            outgoing = incoming = None
            if send is not None:
                outgoing = (self._members[send.peer], octets[send.start * size : send.stop * size])
            if receive is not None:
                if reduce:
                    sink: Sink = self._reduction(call.op, values, send, receive)
                else:
                    sink = Replace(octets[receive.start * size : receive.stop * size])
                incoming = (self._members[receive.peer], sink)
            self._backend.exchange(call, outgoing, incoming)

    def _reduction(self, op: str, values: Array, send: Span | None, receive: Span) -> Reduce:
        target = values[receive.start : receive.stop]
        at_once = send is None or send.stop <= receive.start or receive.stop <= send.start
        need = scratch_elements(target, at_once=at_once)
        scratch = self._scratch.get(values.dtype.name)
        if scratch is None or len(scratch) < need:
            scratch = self._scratch[values.dtype.name] = np.empty(need, values.dtype)
        return Reduce(target, OPERATIONS[op], scratch, peer_first=receive.peer < self.place, at_once=at_once)
