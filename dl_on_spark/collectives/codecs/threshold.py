"""A fixed threshold on the magnitude, with error feedback (Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Arrays, Bucket, Codec, check_positive
from dl_on_spark.collectives.codecs.sparse import sparse_bytes_sent, sum_sparse

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator


@dataclass(frozen=True)
class Threshold(Codec):
    """Send all elements of magnitude at least ``threshold``, as index and value; Strom sends ±threshold instead.

    The threshold is on the gradient weighted by rows (about a mean gradient divided by the number of workers)
    plus the residual. Payload: ``8 k`` bytes for the k elements found, which differ from rank to rank; before it
    all ranks tell k, twice 8 bytes. Identity: no residual's magnitude reaches the threshold
    (but for the rounding of float64 gradients to the float32 values that travel).
    """

    name: ClassVar[str] = "threshold"
    threshold: float = 1e-3

    def __post_init__(self) -> None:
        check_positive(self, threshold=self.threshold)

    def start(self, bucket: Bucket) -> Arrays:
        return {"residual": np.zeros(bucket.size, bucket.dtype)}

    def reduce(
        self, gradient: Array, state: Arrays, step: int, bucket: Bucket, comm: Communicator
    ) -> tuple[Array, Arrays]:
        residual = gradient + state["residual"]
        chosen = np.flatnonzero(~(np.abs(residual) < self.threshold))  # what is no number is sent too
        sent = residual[chosen].astype(np.float32)
        residual[chosen] -= sent
        return sum_sparse(comm, chosen, sent, bucket.size, bucket.dtype, same_count=False), {"residual": residual}

    def bytes_sent(self, bucket: Bucket, world_size: int) -> float:
        """An upper bound: how many elements reach the threshold is up to the data."""
        return 16 * (world_size - 1) + sparse_bytes_sent(bucket.size, bucket.size, bucket.dtype, world_size)
