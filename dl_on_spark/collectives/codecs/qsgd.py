"""QSGD: random rounding to a few levels of the norm (Alistarh et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Bucket, Octets, check_count
from dl_on_spark.collectives.codecs.packing import in_chunks, joined, pack, packed_bytes, unpack
from dl_on_spark.collectives.codecs.payload import PayloadCodec
from dl_on_spark.errors import ConfigError


@dataclass(frozen=True)
class QSGD(PayloadCodec):
    """Send ``sign(v) l / s`` times the 2-norm of each ``chunk``, where l is one of the two integers about
    ``s |v| / norm``, drawn so that the mean is v; s is ``levels``.

    A code takes 2 bits with 1 level, 4 bits with up to 7, 8 bits with up to 127 (the paper's Elias code would
    need a variable length). Payload: ``ceil(n bits / 8) + 4 ceil(n / chunk)`` bytes. Identities, for a chunk of
    d elements: unbiased, ``E |Q(v) - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2``. No residual is kept.
    """

    name: ClassVar[str] = "qsgd"
    feedback: ClassVar[bool] = False
    levels: int = 7
    chunk: int = 512

    def __post_init__(self) -> None:
        check_count(self, levels=self.levels, chunk=self.chunk)
        if self.levels > 127:
            raise ConfigError(f"{self.name}: levels={self.levels}.", fix="Use 1 to 127 levels.")

    @property
    def bits(self) -> int:
        """Bits of a code, which is one of 2 s + 1."""
        return 2 if self.levels == 1 else 4 if self.levels <= 7 else 8

    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        chunks = in_chunks(values, self.chunk)
        largest = np.abs(chunks).max(axis=1, initial=0, keepdims=True)
        largest = np.where(largest == 0, 1, largest)  # squares of what is left neither overflow nor vanish
        norms = (np.sqrt(np.square(chunks / largest).sum(axis=1)) * largest[:, 0]).astype(np.float32)
        level = chunks / np.where(norms == 0, 1, norms)[:, None] * self.levels
        code = np.floor(level + rng.random(level.shape, np.float32))  # floor(x + u) has the mean x, for x < 0 too
        np.clip(code, -self.levels, self.levels, out=code)  # the norm was rounded
        codes = (code + self.levels).astype(np.uint8).reshape(-1)[: bucket.size]
        return joined(norms, pack(codes, self.bits))

    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        start = 4 * -(-bucket.size // self.chunk)
        scales = payload[:start].view(np.float32).astype(bucket.dtype) / bucket.dtype.type(self.levels)
        codes = unpack(payload[start:], self.bits, bucket.size).astype(bucket.dtype) - self.levels
        values: Array = (in_chunks(codes, self.chunk) * scales[:, None]).reshape(-1)[: bucket.size]
        return values

    def payload_bytes(self, bucket: Bucket) -> int:
        return packed_bytes(bucket.size, self.bits) + 4 * -(-bucket.size // self.chunk)

    @property
    def unit(self) -> int | None:
        return self.chunk
