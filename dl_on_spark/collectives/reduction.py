"""Operations and element types that ranks can reduce."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import CollectiveError

Array = npt.NDArray[Any]
Combine = Callable[..., Any]

OPERATIONS: dict[str, Combine] = {"sum": np.add, "mean": np.add, "max": np.maximum}
"""What joins two partial results; a mean is a sum, divided at the end by the world size."""

_HALF = ("float16", "bfloat16")
_REDUCIBLE = ("float32", "float64", "int32", "int64", *_HALF)


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, remembered: NumPy spells it anew each time, for the price of reducing a small array."""
    return dtype.name


def check_reducible(array: Array, op: str) -> None:
    """Refuse what cannot be reduced, before anything is sent (the communicator stays whole)."""
    if op not in OPERATIONS:
        raise CollectiveError(f"there is no reduction {op!r}.", fix=f"Use one of: {', '.join(OPERATIONS)}.")
    if dtype_name(array.dtype) not in _REDUCIBLE or not array.dtype.isnative:
        raise CollectiveError(
            f"an array of {array.dtype} cannot be reduced.",
            fix=f"Cast it to one of: {', '.join(_REDUCIBLE)}.",
        )
    if op == "mean" and array.dtype.kind in "iu":
        raise CollectiveError(
            f"the mean of {array.dtype} values does not fit in their type.",
            fix='Use op="sum" and divide, or cast to a floating type.',
        )
    check_in_place(array)


def check_in_place(array: Array) -> None:
    """Results are written in place, through a flat view: the array must allow one."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise CollectiveError(
            "collectives work in place on a writeable, C-contiguous numpy array.",
            fix="Pass numpy.ascontiguousarray(x) (a copy where x is not contiguous), or x.copy().",
        )


def accumulator(array: Array) -> Array:
    """The flat buffer sums are made in: a view of the array, or a float32 copy of half types."""
    flat = array.reshape(-1)
    return flat.astype(np.float32) if dtype_name(array.dtype) in _HALF else flat


def finish(values: Array, op: str, world_size: int) -> None:
    """Turn complete sums into the result, in place."""
    if op == "mean":
        np.divide(values, world_size, out=values)
