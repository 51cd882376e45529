"""Top-k: the elements of greatest magnitude, with error feedback (Aji and Heafield 2017; Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Arrays, Bucket, Codec, check_fraction
from dl_on_spark.collectives.codecs.sparse import sparse_bytes_sent, sum_sparse

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

_SAMPLE = 64


@dataclass(frozen=True)
class TopK(Codec):
    """Send the ``k = fraction n`` elements of greatest magnitude of a bucket (at least one), as index and value.

    Payload: ``8 k`` bytes; all ranks' payloads together never take more than the dense gradient (`sum_sparse`).
    Identity: ``|C(v) - v|^2 <= (1 - k / n) |v|^2``.
    """

    name: ClassVar[str] = "topk"
    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_fraction(self, fraction=self.fraction)

    def start(self, bucket: Bucket) -> Arrays:
        return {"residual": np.zeros(bucket.size, bucket.dtype)}

    def reduce(
        self, gradient: Array, state: Arrays, step: int, bucket: Bucket, comm: Communicator
    ) -> tuple[Array, Arrays]:
        residual = gradient + state["residual"]
        chosen = largest(np.abs(residual), count_of(self.fraction, bucket.size))
        sent = residual[chosen].astype(np.float32)
        residual[chosen] -= sent
        return sum_sparse(comm, chosen, sent, bucket.size, bucket.dtype, same_count=True), {"residual": residual}

    def bytes_sent(self, bucket: Bucket, world_size: int) -> float:
        pairs = count_of(self.fraction, bucket.size)
        return sparse_bytes_sent(pairs, bucket.size, bucket.dtype, world_size)


def count_of(fraction: float, size: int) -> int:
    """How many of ``size`` elements a fraction is: at least one, where there is one."""
    return min(size, max(1, round(fraction * size)))


def largest(magnitudes: Array, count: int) -> Array:
    """Indices of the ``count`` greatest of ``magnitudes`` (NaN counts as greatest), in rising order.

    A sample gives a bound that spares most elements the selection; the result does not depend on the sample.
    """
    size = magnitudes.size
    if count >= size:
        return np.arange(size)
    candidates = np.arange(0)
    if size > 64 * _SAMPLE and count < size // 4:
        sample = magnitudes[::_SAMPLE]
        at = max(0, sample.size - 1 - int(1.5 * count / size * sample.size) - 4)
        candidates = np.flatnonzero(~(magnitudes < np.partition(sample, at)[at]))
    if candidates.size < count:
        candidates = np.arange(size)
    order = np.argpartition(magnitudes[candidates], candidates.size - count)
    return np.sort(candidates[order[candidates.size - count :]])
