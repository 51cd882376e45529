"""Codecs whose payload has a size known beforehand, and how such payloads are summed.

Three ways, the one of fewest bytes is taken; B is the payload of a bucket, b that of its greatest block:

- gather: every rank gets all payloads, decodes and sums them: ``(P - 1) B`` bytes sent a rank;
- in blocks: each rank gets the payloads of one block, sums it, encodes the sum, and all get the sums (compressed both
  ways, as in DoubleSqueeze, Tang et al. 2019): ``2 (P - 1) b``. The rank that rounded a sum keeps what the
  rounding lost in its residual, so nothing is lost here either. For codecs whose payload can be cut;
- densely: what payloads decode to is reduced as it is: ``2 (P - 1) / P`` times the dense bucket.

All ranks sum in the order of ranks, or get one rank's sum, so all end with the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Arrays, Bucket, Codec, Octets

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator


class PayloadCodec(Codec):
    """Encode, exchange, decode and sum; with error feedback unless the codec is unbiased.

    ``feedback``: whether a residual is kept. An unbiased codec needs none, and its variance would grow with one.
    """

    feedback: ClassVar[bool] = True

    @abstractmethod
    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        """The payload of ``values``, shape (bucket.size,): as many bytes as `payload_bytes` says."""

    @abstractmethod
    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        """What the payload stands for, shape (bucket.size,), in the bucket's dtype."""

    @abstractmethod
    def payload_bytes(self, bucket: Bucket) -> int:
        """Bytes of one payload."""

    @property
    def unit(self) -> int | None:
        """Where a payload can be cut: at multiples of so many elements; None: nowhere."""
        return None

    def start(self, bucket: Bucket) -> Arrays:
        return {"residual": np.zeros(bucket.size, bucket.dtype)} if self.feedback else {}

    def reduce(
        self, gradient: Array, state: Arrays, step: int, bucket: Bucket, comm: Communicator
    ) -> tuple[Array, Arrays]:
        values = gradient + state["residual"] if self.feedback else gradient
        costs = self._costs(bucket, comm.world_size)
        way = min(costs, key=lambda name: costs[name])
        if way == "blocks":
            total, lost = self._in_blocks(values, bucket, step, comm)
        else:
            payload = self.encode(values, bucket, bucket.rng(step))
            own = self.decode(payload, bucket)
            lost = values - own
            total = self._gathered(payload, own, bucket, comm) if way == "gather" else comm.allreduce(own)
        return total, {"residual": lost} if self.feedback else {}

    def bytes_sent(self, bucket: Bucket, world_size: int) -> float:
        return min(self._costs(bucket, world_size).values())

    def _costs(self, bucket: Bucket, world_size: int) -> dict[str, float]:
        """Bytes a rank sends, by way; among equals the first is taken."""
        others = world_size - 1
        costs: dict[str, float] = {"gather": others * self.payload_bytes(bucket)}
        if self.unit is not None:
            costs["blocks"] = 2 * others * self.payload_bytes(self._blocks(bucket, world_size)[0])
        costs["dense"] = 2 * others / world_size * bucket.size * bucket.dtype.itemsize
        return costs

    def _gathered(self, payload: Octets, own: Array, bucket: Bucket, comm: Communicator) -> Array:
        total = np.zeros_like(own)
        for rank, other in enumerate(comm.allgather(payload)):
            total += own if rank == comm.rank else self.decode(other, bucket)
        return total

    def _in_blocks(self, values: Array, bucket: Bucket, step: int, comm: Communicator) -> tuple[Array, Array]:
        """(sum, what this rank's two encodings lost)."""
        rng, blocks = bucket.rng(step), self._blocks(bucket, comm.world_size)
        starts = np.cumsum([0, *(block.size for block in blocks)])
        outgoing = np.zeros((len(blocks), self.payload_bytes(blocks[0])), np.uint8)
        lost = values.copy()
        for row, block, start in zip(outgoing, blocks, starts[:-1], strict=True):
            part = lost[start : start + block.size]
            payload = row[: self.payload_bytes(block)]
            payload[:] = self.encode(part, block, rng)
            part -= self.decode(payload, block)
        mine, start = blocks[comm.rank], starts[comm.rank]
        size = self.payload_bytes(mine)
        block_sum = np.zeros(mine.size, bucket.dtype)
        for payload in comm.alltoall(outgoing):
            block_sum += self.decode(payload[:size], mine)
        second = np.zeros(outgoing.shape[1], np.uint8)
        second[:size] = self.encode(block_sum, mine, rng)
        lost[start : start + mine.size] += block_sum - self.decode(second[:size], mine)
        gathered = zip(comm.allgather(second), blocks, strict=True)
        total = np.concatenate([self.decode(row[: self.payload_bytes(block)], block) for row, block in gathered])
        return total, lost

    def _blocks(self, bucket: Bucket, world_size: int) -> list[Bucket]:
        """A block for each rank, the first the greatest, cut at multiples of `unit`."""
        unit = self.unit or 1
        each = -(-bucket.size // (world_size * unit)) * unit
        sizes = [min(each, max(0, bucket.size - rank * each)) for rank in range(world_size)]
        return [Bucket(((size,),), bucket.dtype, bucket.rank, bucket.seed, bucket.number) for size in sizes]
