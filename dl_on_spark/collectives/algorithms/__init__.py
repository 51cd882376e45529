"""The algorithms by name: one file and one line each."""

from __future__ import annotations

from collections.abc import Callable

from dl_on_spark.collectives.algorithms import linear, rabenseifner, recursive_doubling, ring, tree
from dl_on_spark.collectives.schedule import Schedule, Steps

ALLREDUCE: dict[str, Callable[[int, int, int], Schedule]] = {
    "linear": linear.allreduce,
    "tree": tree.allreduce,
    "recursive_doubling": recursive_doubling.allreduce,
    "rabenseifner": rabenseifner.allreduce,
    "ring": ring.allreduce,
}
"""(rank, world size, elements) -> the allreduce of this rank."""

BROADCAST: dict[str, Callable[[int, int, int, int], Steps]] = {
    "linear": linear.broadcast,
    "tree": tree.broadcast,
}
"""(rank, world size, elements, root) -> the steps of this rank."""
