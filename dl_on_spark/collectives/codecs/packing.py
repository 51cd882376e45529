"""How numbers become bytes: small integers packed into 2, 4 or 8 bits, arrays put one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Octets = npt.NDArray[np.uint8]


def pack(codes: Octets, bits: int) -> Octets:
    """Codes below ``2 ** bits`` in ``ceil(n bits / 8)`` bytes; ``bits`` is 2, 4 or 8."""
    each = 8 // bits
    if each == 1:
        return codes
    padded = np.zeros(-(-codes.size // each) * each, np.uint8)
    padded[: codes.size] = codes
    packed = padded[::each].copy()
    for place in range(1, each):
        packed |= padded[place::each] << np.uint8(place * bits)
    return packed


def unpack(packed: Octets, bits: int, size: int) -> Octets:
    """The ``size`` codes that `pack` packed."""
    each = 8 // bits
    if each == 1:
        return packed[:size]
    codes = np.empty((packed.size, each), np.uint8)
    for place in range(each):
        codes[:, place] = (packed >> np.uint8(place * bits)) & np.uint8(2**bits - 1)
    return codes.reshape(-1)[:size]


def packed_bytes(size: int, bits: int) -> int:
    """Bytes of ``size`` codes of ``bits`` bits."""
    return -(-size * bits // 8)


def joined(*arrays: Array) -> Octets:
    """The bytes of arrays, one after the other."""
    return np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays])


def in_chunks(values: Array, chunk: int) -> Array:
    """Flat values as rows of ``chunk``, shape (ceil(n / chunk), chunk), the last one padded with zeros."""
    rows = -(-values.size // chunk)
    if rows * chunk == values.size:
        return values.reshape(rows, chunk)
    padded = np.zeros(rows * chunk, values.dtype)
    padded[: values.size] = values
    return padded.reshape(rows, chunk)
