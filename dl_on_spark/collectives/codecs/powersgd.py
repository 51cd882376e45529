"""PowerSGD: every matrix as a product of two thin ones (Vogels et al. 2019, algorithms 1 and 2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import SHARED, Array, Arrays, Bucket, Codec, check_count
from dl_on_spark.collectives.codecs.low_rank import expand, orthonormal

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

_FACTOR = f"{SHARED}factor"


@dataclass(frozen=True)
class PowerSGD(Codec):
    """One power iteration a step on ``M = sum_k M_k``, M_k = gradient + residual of rank k: ``P = sum M_k Q``,
    made orthonormal; ``Q = sum M_k^T P``; the sum is ``P Q^T``. Q is kept for the next step (warm start).

    A tensor is a matrix (all axes but the last, last axis); vectors, and matrices that ``rank`` columns would not
    make smaller, are summed as they are. The factors travel in two allreduces:
    ``rank (n + m)`` elements a matrix instead of ``n m``. The residual of a rank is ``M_k - P P^T M_k``: over the
    ranks it sums to ``M - P Q^T``, as the paper's does, and it does not grow where ranks' gradients differ.
    Identities: linear, the same as compressing the sum; a projection, so ``|C(M) - M|^2 <= |M|^2``; exact for a
    sum of rank up to ``rank``, but for what the warm start has yet to find.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 2

    def __post_init__(self) -> None:
        check_count(self, rank=self.rank)

    def start(self, bucket: Bucket) -> Arrays:
        columns = sum(m for _, m, thin in self._matrices(bucket) if thin)
        factor = bucket.rng(0, shared=True).uniform(-1, 1, (columns, self.rank))
        return {"residual": np.zeros(bucket.size, bucket.dtype), _FACTOR: factor.astype(bucket.dtype)}

    def reduce(
        self, gradient: Array, state: Arrays, step: int, bucket: Bucket, comm: Communicator
    ) -> tuple[Array, Arrays]:
        values = gradient + state["residual"]
        plan = self._matrices(bucket)
        parts = [part.reshape(n, m) for part, (n, m, _) in zip(bucket.split(values), plan, strict=True)]
        thin = [part for part, (_, _, is_thin) in zip(parts, plan, strict=True) if is_thin]
        dense = [part for part, (_, _, is_thin) in zip(parts, plan, strict=True) if not is_thin]
        warm = _rows(state[_FACTOR], [matrix.shape[1] for matrix in thin])

        # First what is dense and the left factors in one message, then the right factors in another.
        left = [matrix @ q for matrix, q in zip(thin, warm, strict=True)]
        first = comm.allreduce(_flat([*dense, *left], bucket))
        left = [orthonormal(p) for p in _shaped(first, [*dense, *left])[len(dense) :]]
        own = [matrix.T @ p for matrix, p in zip(thin, left, strict=True)]
        right = _shaped(comm.allreduce(_flat(own, bucket)), own)

        total, residual = np.empty_like(values), np.zeros_like(values)
        sums, factors = iter(_shaped(first, dense)), iter(zip(left, own, right, strict=True))
        for out, kept, matrix, (n, m, is_thin) in zip(
            bucket.split(total), bucket.split(residual), parts, plan, strict=True
        ):
            if is_thin:
                p, own_q, q = next(factors)
                expand(p, q, out=out.reshape(n, m))
                np.subtract(matrix, p @ own_q.T, out=kept.reshape(n, m))
            else:
                out[:] = next(sums).reshape(-1)
        return total, {"residual": residual, _FACTOR: self._next_factor(right, step, bucket)}

    def bytes_sent(self, bucket: Bucket, world_size: int) -> float:
        """With a ring; a small message goes by recursive doubling, ``log2 P`` times its size."""
        elements = sum(self.rank * (n + m) if thin else n * m for n, m, thin in self._matrices(bucket))
        return 2 * (world_size - 1) / world_size * elements * bucket.dtype.itemsize

    def _matrices(self, bucket: Bucket) -> list[tuple[int, int, bool]]:
        """(rows, columns, whether factors are smaller) of every tensor."""
        found = []
        for shape, size in zip(bucket.shapes, bucket.sizes, strict=True):
            columns = shape[-1] if shape else 1
            rows = size // columns if columns else 0
            found.append((rows, columns, self.rank * (rows + columns) < size))
        return found

    def _next_factor(self, right: list[Array], step: int, bucket: Bucket) -> Array:
        """The right factors, scaled so that no product vanishes; a direction in which nothing was found begins
        anew, or it would be lost for good."""
        scaled = [q / np.where(np.abs(q).max(axis=0) == 0, 1, np.abs(q).max(axis=0)) for q in right]
        if any((q == 0).all(axis=0).any() for q in right):
            fresh = bucket.rng(step + 1, shared=True).uniform(-1, 1, (sum(map(len, right)), self.rank))
            parts = _rows(fresh.astype(bucket.dtype), [len(q) for q in right])
            scaled = [np.where((q == 0).all(axis=0), part, q) for q, part in zip(scaled, parts, strict=True)]
        return np.concatenate([np.zeros((0, self.rank), bucket.dtype), *scaled])


def _flat(matrices: list[Array], bucket: Bucket) -> Array:
    return np.concatenate([np.zeros(0, bucket.dtype), *(matrix.reshape(-1) for matrix in matrices)])


def _shaped(flat: Array, like: list[Array]) -> list[Array]:
    stops = list(accumulate(matrix.size for matrix in like))
    return [flat[stop - m.size : stop].reshape(m.shape) for stop, m in zip(stops, like, strict=True)]


def _rows(table: Array, counts: list[int]) -> list[Array]:
    stops = list(accumulate(counts))
    return [table[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
