"""Several hosts with several ranks: shared memory inside a host, TCP between one rank of each."""

from __future__ import annotations

import dataclasses

import numpy as np

from dl_on_spark.collectives.reduction import Array
from dl_on_spark.collectives.scheduled import Scheduled
from dl_on_spark.collectives.shared import SharedMemory
from dl_on_spark.collectives.tcp import Backend
from dl_on_spark.collectives.wire import Call


class Hierarchical(Scheduled):
    """Allreduce in three stages; every other collective is that of a flat world over TCP.

    The first rank of each host leads it. Only leaders send over the network, each as much as one
    rank in a world of as many ranks as there are hosts.
    """

    def __init__(
        self,
        backend: Backend,
        rank: int,
        world_size: int,
        groups: tuple[tuple[int, ...], ...],
        host: SharedMemory | None,
    ) -> None:
        super().__init__(backend, rank, range(world_size), world_size)
        leaders = sorted(group[0] for group in groups)
        self._host = host
        self._leaders = Scheduled(backend, rank, leaders, world_size) if rank in leaders else None

    def allreduce(self, call: Call, values: Array) -> None:
        """Reduce to the leader, allreduce among leaders, broadcast from the leader."""
        if self._host is not None:
            # the division of a mean comes once, when the leaders hold the sum of all hosts
            inside = dataclasses.replace(call, op="sum") if call.op == "mean" else call
            self._host.reduce(inside, values)
        if self._leaders is not None:
            self._leaders.allreduce(call, values)
        if self._host is not None:
            self._host.broadcast(dataclasses.replace(call, root=self._host.members[0]), values.view(np.uint8))
