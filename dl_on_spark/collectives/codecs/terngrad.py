"""TernGrad: every element becomes -1, 0 or 1 times the tensor's largest (Wen et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Bucket, Octets, check_positive
from dl_on_spark.collectives.codecs.packing import joined, pack, packed_bytes, unpack
from dl_on_spark.collectives.codecs.payload import PayloadCodec


@dataclass(frozen=True)
class TernGrad(PayloadCodec):
    """Send ``s sign(v) b`` with ``s = max |v|`` of the tensor and ``P(b = 1) = |v| / s``.

    ``clip``: cut values at so many standard deviations of the tensor first (the paper takes 2.5): less
    variance, but what is sent is then biased. Payload: ``ceil(n / 4)`` bytes and 4 for every tensor.
    Identities without clip: unbiased, ``E |C(v) - v|^2 = sum(s |v_i| - v_i^2)``. No residual is kept.
    """

    name: ClassVar[str] = "terngrad"
    feedback: ClassVar[bool] = False
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_positive(self, clip=self.clip)

    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        scales = np.zeros(len(bucket.shapes), np.float32)
        codes = np.ones(bucket.size, np.uint8)
        draws = rng.random(bucket.size, np.float32)
        for number, (part, code, draw) in enumerate(
            zip(bucket.split(values), bucket.split(codes), bucket.split(draws), strict=True)
        ):
            kept = part
            if self.clip is not None and part.size:
                limit = self.clip * part.std()
                kept = np.clip(part, -limit, limit)
            scale = scales[number] = np.abs(kept).max(initial=0)
            if scale > 0:
                code[:] = 1 + np.sign(kept) * (draw < np.abs(kept) / scale)
        return joined(scales, pack(codes, 2))

    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        start = 4 * len(bucket.shapes)
        scales = payload[:start].view(np.float32)
        signs = unpack(payload[start:], 2, bucket.size).astype(bucket.dtype) - 1
        values: Array = signs * np.repeat(scales.astype(bucket.dtype), bucket.sizes)
        return values

    def payload_bytes(self, bucket: Bucket) -> int:
        return packed_bytes(bucket.size, 2) + 4 * len(bucket.shapes)
