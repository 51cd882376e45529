"""How sparse arrays travel: as pairs to all ranks, or densely where that takes fewer bytes.

With a ring, gathering sends ``sum of all payloads (P - 1) / P`` bytes a rank and a dense allreduce
``2 (P - 1) / P`` times the dense array. So payloads are gathered while all of them together are smaller than
twice the dense array. Which way they go never changes what is sent, only how it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

Array = npt.NDArray[Any]


def gather_is_cheaper(all_payload_bytes: int, dense_bytes: int) -> bool:
    """Whether payloads that take ``all_payload_bytes`` together are better gathered than sent densely."""
    return all_payload_bytes < 2 * dense_bytes


PAIR_BYTES = 8
"""Bytes of one sent element of a sparse array: a uint32 index and a float32 value."""


def sum_sparse(
    comm: Communicator, indices: Array, values: Array, size: int, dtype: np.dtype[Any], *, same_count: bool
) -> Array:
    """Sum of all ranks' sparse arrays of ``size`` elements, in the order of ranks: the same bits on all.

    ``indices``: int64, each once. ``values``: float32. ``same_count``: whether all ranks send as many, which
    saves asking them. Above ``size / P`` elements a rank the sum is made densely.
    """
    pairs = indices.size * comm.world_size if same_count else int(comm.allgather(np.array([indices.size])).sum())
    if not gather_is_cheaper(pairs * PAIR_BYTES, size * dtype.itemsize):
        dense = np.zeros(size, dtype)
        dense[indices] = values
        return comm.allreduce(dense)
    payload = np.concatenate([indices.astype(np.uint32).view(np.uint8), values.view(np.uint8)])
    gathered = (
        list(comm.allgather(payload))
        if same_count
        else [np.frombuffer(other, np.uint8) for other in comm.allgather_bytes(payload.tobytes())]
    )
    total = np.zeros(size, dtype)
    for other in gathered:
        half = other.size // 2
        total[other[:half].view(np.uint32)] += other[half:].view(np.float32)
    return total


def sparse_bytes_sent(pairs: float, size: int, dtype: np.dtype[Any], world_size: int) -> float:
    """Bytes that a rank sends in `sum_sparse`, on average, when each sends ``pairs`` elements."""
    return (world_size - 1) * min(pairs * PAIR_BYTES, 2 * size * dtype.itemsize / world_size)
