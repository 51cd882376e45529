"""How payloads travel: to all ranks, or densely where that takes fewer bytes.

With a ring, gathering sends ``sum of all payloads (P - 1) / P`` bytes a rank and a dense allreduce
``2 (P - 1) / P`` times the dense array. So payloads are gathered while all of them together are smaller than
twice the dense array. Which way they go never changes what is sent, only how it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

Array = npt.NDArray[Any]
Octets = npt.NDArray[np.uint8]


def gather_is_cheaper(all_payload_bytes: int, dense_bytes: int) -> bool:
    """Whether payloads that take ``all_payload_bytes`` together are better gathered than sent densely."""
    return all_payload_bytes < 2 * dense_bytes


def sum_payloads(comm: Communicator, payload: Octets, own: Array, decode: Callable[[Octets], Array]) -> Array:
    """Sum of all ranks' payloads, in the order of ranks, so that all end with the same bits.

    ``payload``: of the same size on all ranks. ``own``: what it decodes to.
    """
    if not gather_is_cheaper(payload.nbytes * comm.world_size, own.nbytes):
        return comm.allreduce(own.copy())
    total = np.zeros_like(own)
    for rank, other in enumerate(comm.allgather(payload)):
        total += own if rank == comm.rank else decode(other)
    return total
