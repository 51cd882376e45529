"""Matrix steps of PowerSGD that every rank does on the same values and that must give the same bits on all.

BLAS and LAPACK sum in an order that depends on processor and threads, so these use elementwise operations only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LOST = 32
"""A column that loses all but so many roundings to those before it holds nothing new."""


def orthonormal(matrix: Array) -> Array:
    """Columns made orthonormal by Gram and Schmidt's modified method, done twice; shape (n, r) as given.

    A column that depends on those before it becomes zeros. Values that are no numbers stay so.
    """
    result = matrix.copy()
    epsilon = np.finfo(matrix.dtype).eps
    for column in range(matrix.shape[1]):
        vector = result[:, column]
        largest = np.abs(vector).max(initial=0)
        if largest == 0:
            continue
        vector /= largest  # so that squares neither overflow nor vanish
        before = np.sqrt(folded_sum(vector * vector))
        for _ in range(2):
            for earlier in range(column):
                vector -= result[:, earlier] * folded_sum(result[:, earlier] * vector)
        norm = np.sqrt(folded_sum(vector * vector))
        if norm <= _LOST * epsilon * before:
            vector[:] = 0
        else:
            vector /= norm
    return result


def expand(left: Array, right: Array, out: Array) -> None:
    """``left right^T`` into ``out``; shapes (n, r), (m, r), (n, m)."""
    out[:] = 0
    for column in range(left.shape[1]):
        out += left[:, column, None] * right[None, :, column]


def folded_sum(values: Array) -> Any:
    """Sum over the first axis by adding halves, in one order on every machine."""
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = values[:half] + values[half : 2 * half]
        if len(rest):
            values[0] += rest[0]
    return values[0] if len(values) else values.sum()
