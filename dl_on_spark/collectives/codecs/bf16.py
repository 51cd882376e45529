"""bfloat16: the upper half of a float32, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Bucket, Octets
from dl_on_spark.collectives.codecs.payload import PayloadCodec

_LARGEST = np.uint16(0x7F7F)
_NAN = np.uint16(0x7FC0)


@dataclass(frozen=True)
class BF16(PayloadCodec):
    """Send two bytes an element: 8 significant bits and float32's range, rounded to the nearest, ties to even.

    Identity: ``|C(v) - v| <= 2^-8 |v|`` for normal float32 values.
    """

    name: ClassVar[str] = "bf16"

    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        bits = values.astype(np.float32).view(np.uint32)
        upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        beyond = (upper & 0x7F80) == 0x7F80  # infinite or no number, or rounded up to it
        if beyond.any():
            sign = (bits[beyond] >> 16).astype(np.uint16) & 0x8000
            upper[beyond] = sign | np.where(np.isfinite(values[beyond]), _LARGEST, np.uint16(0x7F80))
        upper[np.isnan(values)] = _NAN
        return upper.view(np.uint8)

    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        return (payload.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(bucket.dtype, copy=False)

    def payload_bytes(self, bucket: Bucket) -> int:
        return 2 * bucket.size

    @property
    def unit(self) -> int | None:
        return 1
