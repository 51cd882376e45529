"""Which algorithm carries a message: a function of sizes alone, so that all ranks agree."""

from __future__ import annotations

from functools import lru_cache

from dl_on_spark.collectives.algorithms import ALLREDUCE, BROADCAST
from dl_on_spark.collectives.schedule import Schedule
from dl_on_spark.errors import CollectiveError

SMALL_BYTES = 128 * 1024
"""At most this many bytes go by recursive doubling (few steps), more by the ring (few bytes).

On loopback with two ranks the two are level from 128 to 256 KiB, and the ring leads from 1 MiB.
"""


def check_algorithm(name: str) -> str:
    """``name`` if it is known; CollectiveError with the known names otherwise."""
    if name != "auto" and name not in ALLREDUCE:
        raise CollectiveError(
            f"there is no allreduce algorithm {name!r}.",
            fix=f"Use one of: auto, {', '.join(ALLREDUCE)}.",
        )
    return name


def allreduce_algorithm(name: str, nbytes: int) -> str:
    """The algorithm of a message of ``nbytes`` under the communicator's setting ``name``."""
    if name != "auto":
        return name
    return "recursive_doubling" if nbytes <= SMALL_BYTES else "ring"


def broadcast_algorithm(name: str) -> str:
    """``name`` where it has a broadcast, else the tree."""
    return name if name in BROADCAST else "tree"


@lru_cache(maxsize=1024)
def allreduce_schedule(algorithm: str, rank: int, world_size: int, n: int) -> Schedule:
    """The schedule, remembered: training reduces the same sizes at every step."""
    return ALLREDUCE[algorithm](rank, world_size, n)
