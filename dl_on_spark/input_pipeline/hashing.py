"""A hash of values that never changes: not between processes, machines, versions or file layouts.

Text and bytes: 64-bit FNV-1a over the UTF-8 bytes (Fowler, Noll, Vo). Whole numbers (also dates,
timestamps and bool): their 64-bit value. Both end with the finalizer of SplitMix64 (Steele et al.,
OOPSLA 2014), which spreads close values over all buckets; the bucket is the hash modulo the
number of buckets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.input_pipeline.tensors import dictionary_encoded

Hashes = npt.NDArray[np.uint64]

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


def stable_buckets(array: pa.Array, buckets: int) -> npt.NDArray[np.int32]:
    """The bucket, from 0 to ``buckets - 1``, of each value of a flat array without nulls."""
    if len(array) == 0:
        return np.zeros(0, np.int32)
    # Distinct values only: categories repeat, and the text hash costs one pass a character.
    encoded = dictionary_encoded(array)
    hashes = _spread(_raw_hashes(encoded.dictionary)) % np.uint64(buckets)
    return np.asarray(hashes.astype(np.int32).take(encoded.indices.to_numpy()))


def _raw_hashes(values: pa.Array) -> Hashes:
    kind = values.type
    if pa.types.is_date(kind):
        values = values.cast(pa.date32()).view(pa.int32())
    elif pa.types.is_timestamp(kind):
        values = values.cast(pa.timestamp("us", kind.tz), safe=False).view(pa.int64())
    elif pa.types.is_boolean(kind):
        values = values.cast(pa.int8())
    if pa.types.is_integer(values.type):
        return np.asarray(values.cast(pa.int64(), safe=False).to_numpy()).view(np.uint64)
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        values = values.cast(pa.large_string())
    return _fnv1a(values.cast(pa.large_binary()))


def _fnv1a(values: pa.Array) -> Hashes:
    """FNV-1a of each value, one vectorized pass for each byte position of the longest value."""
    _, offsets_buffer, data_buffer = values.buffers()
    bounds = np.frombuffer(offsets_buffer, np.int64, len(values) + 1, values.offset * 8)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    lengths = np.diff(bounds)
    longest_first = np.argsort(-lengths, kind="stable")
    starts, sorted_lengths = bounds[:-1][longest_first], lengths[longest_first]
    hashes = np.full(len(values), _FNV_OFFSET)
    for position in range(int(sorted_lengths[0])):
        count = int(np.searchsorted(-sorted_lengths, -position, side="left"))
        hashes[:count] = (hashes[:count] ^ data[starts[:count] + position]) * _FNV_PRIME
    result = np.empty_like(hashes)
    result[longest_first] = hashes
    return result


def _spread(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))
