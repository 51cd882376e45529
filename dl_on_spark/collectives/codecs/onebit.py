"""One bit an element, with two means for every column (Seide et al. 2014), with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Bucket, Octets
from dl_on_spark.collectives.codecs.packing import joined
from dl_on_spark.collectives.codecs.payload import PayloadCodec


@dataclass(frozen=True)
class OneBit(PayloadCodec):
    """Send each element's sign, and for every column the mean of its values >= 0 and that of those < 0.

    A column is all weights of one output (a tensor's last axis is the columns); a tensor of fewer than two
    axes is one column. Payload: ``ceil(n / 8)`` bytes and 8 for every column. Identity: no two values for the
    two signs are nearer, so ``|C(v) - v|^2 <= (1 - |v|_1^2 / (d |v|_2^2)) |v|^2`` for every column of d elements.
    """

    name: ClassVar[str] = "onebit"

    def encode(self, values: Array, bucket: Bucket, rng: np.random.Generator) -> Octets:
        means = []
        for part, columns in zip(bucket.split(values), _columns(bucket), strict=True):
            table = part.reshape(-1, columns)
            negative = np.minimum(table, 0).sum(axis=0)
            positive = np.maximum(table, 0).sum(axis=0)
            below = (table < 0).sum(axis=0)
            means += [positive / np.maximum(len(table) - below, 1), negative / np.maximum(below, 1)]
        return joined(np.concatenate(means).astype(np.float32), np.packbits(values < 0))

    def decode(self, payload: Octets, bucket: Bucket) -> Array:
        columns = _columns(bucket)
        start = 8 * sum(columns)
        means = payload[:start].view(np.float32)
        negative = np.unpackbits(payload[start:], count=bucket.size).view(np.bool_)
        values = np.empty(bucket.size, bucket.dtype)
        at = 0
        for part, sign, width in zip(bucket.split(values), bucket.split(negative), columns, strict=True):
            positive_means, negative_means = means[at : at + width], means[at + width : at + 2 * width]
            part[:] = np.where(sign.reshape(-1, width), negative_means, positive_means).reshape(-1)
            at += 2 * width
        return values

    def payload_bytes(self, bucket: Bucket) -> int:
        return -(-bucket.size // 8) + 8 * sum(_columns(bucket))


def _columns(bucket: Bucket) -> list[int]:
    return [shape[-1] if len(shape) > 1 and 0 not in shape else 1 for shape in bucket.shapes]
