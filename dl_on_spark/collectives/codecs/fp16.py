"""Half precision: IEEE 754 binary16, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Bucket, Octets
from dl_on_spark.collectives.codecs.payload import PayloadCodec

_LARGEST = 65504.0


@dataclass(frozen=True)
class FP16(PayloadCodec):
    """Send two bytes an element: 11 significant bits, for magnitudes from 6e-8 to 65504.

    A finite value beyond that is sent as the largest one; the residual keeps the rest.
    Identity: ``|C(v) - v| <= 2^-11 |v|`` for v from 6.1e-5 to 65504; at most 2^-25 below.
    """

    name: ClassVar[str] = "fp16"

    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        half = values.astype(np.float16)
        beyond = np.isinf(half)
        if beyond.any():
            beyond &= np.isfinite(values)
            half[beyond] = np.copysign(_LARGEST, values[beyond])
        return half.view(np.uint8)

    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        return payload.view(np.float16).astype(bucket.dtype)

    def payload_bytes(self, bucket: Bucket) -> int:
        return 2 * bucket.size

    @property
    def unit(self) -> int | None:
        return 1
