"""Eight bits with a scale for every chunk (uniform quantization to the nearest), with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Bucket, Octets, check_count
from dl_on_spark.collectives.codecs.packing import in_chunks, joined
from dl_on_spark.collectives.codecs.payload import PayloadCodec


@dataclass(frozen=True)
class Int8(PayloadCodec):
    """Send ``round(v / s)`` as int8, with ``s = max |v| / 127`` of each ``chunk`` of consecutive elements.

    Payload: ``n + 4 ceil(n / chunk)`` bytes. Identity: ``|C(v) - v| <= s / 2``.
    """

    name: ClassVar[str] = "int8"
    chunk: int = 1024

    def __post_init__(self) -> None:
        check_count(self, chunk=self.chunk)

    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        chunks = in_chunks(values, self.chunk)
        scales = (np.abs(chunks).max(axis=1, initial=0) / 127).astype(np.float32)
        codes = np.rint(chunks / np.where(scales == 0, 1, scales)[:, None])
        np.clip(codes, -127, 127, out=codes)  # the scale was rounded
        return joined(scales, codes.astype(np.int8).reshape(-1)[: bucket.size])

    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        start = 4 * -(-bucket.size // self.chunk)
        scales = payload[:start].view(np.float32).astype(bucket.dtype)
        chunks = in_chunks(payload[start:].view(np.int8).astype(bucket.dtype), self.chunk)
        values: Array = (chunks * scales[:, None]).reshape(-1)[: bucket.size]
        return values

    def payload_bytes(self, bucket: Bucket) -> int:
        return bucket.size + 4 * -(-bucket.size // self.chunk)

    @property
    def unit(self) -> int | None:
        return self.chunk
