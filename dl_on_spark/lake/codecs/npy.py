"""Cells that are .npy files (numpy.lib.format, versions 1 to 3).

Tensors of one shape and type have the same header, byte by byte: it is parsed once, compared in all rows at once,
and what follows it is moved by one strided copy.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import lru_cache
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.lake.codecs.cells import BadCell, Cells, Target

Array = npt.NDArray[Any]
_MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 10_000  # what numpy itself reads
# What numpy's header parser raises for bytes that are none.
_UNREADABLE = (ValueError, SyntaxError, TypeError, LookupError, EOFError, TokenError, MemoryError, RecursionError)


@dataclass(frozen=True)
class Header:
    """The type and shape that an .npy header tells; ``length``: where the values begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    length: int

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def decode(cells: Cells, target: Target) -> None:
    """Fill ``target`` with the arrays of ``cells``."""
    rows = np.flatnonzero(cells.valid)
    if not rows.size:
        return
    first = int(rows[0])
    header = header_of(first, cells.cell(first))
    target.takes(first, header.dtype, header.shape)
    if header.shape == target.shape and not header.fortran and header.dtype == target.dtype:
        view = _rows_alike(cells, rows, header)
        if view is not None:
            values = target.values.reshape(len(target.values), -1).view(np.uint8)
            if rows.size == len(values):
                values[...] = view
            else:
                values[rows] = view
            return
    for row, cell in cells:
        read_into(row, cell, target)


def read_into(row: int, cell: memoryview, target: Target) -> None:
    """Put the array of one .npy file into its row of ``target``. Raises `BadCell`."""
    header = header_of(row, cell)
    target.takes(row, header.dtype, header.shape)
    have = len(cell) - header.length
    if have != header.nbytes:
        kind = "truncated" if have < header.nbytes else "too long"
        raise BadCell(row, f"a {kind} .npy: {have} bytes of values instead of {header.nbytes}")
    flat = np.frombuffer(cell[header.length :], header.dtype)
    shape = header.shape
    target.put(row, flat.reshape(shape[::-1]).transpose() if header.fortran else flat.reshape(shape))


def header_of(row: int, cell: memoryview) -> Header:
    """The header of an .npy file. Raises `BadCell` where it is none, or of an object array."""
    try:
        header = _parsed(bytes(cell[: _header_length(bytes(cell[:12]))]))
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise BadCell(row, f"no .npy: {reason or type(error).__name__}") from error
    if header.dtype.hasobject:
        raise BadCell(row, "an object array, which only unpickling could read")
    return header


def encode(values: Array, dtype: np.dtype[Any]) -> bytes:
    """The .npy file of one array."""
    file = io.BytesIO()
    np.save(file, np.asarray(values, dtype, order="C"), allow_pickle=False)
    return file.getvalue()


def encode_rows(tensors: Array, dtype: np.dtype[Any]) -> pa.Array:
    """A binary array of one .npy file a row; less than 2 GiB in all."""
    start = io.BytesIO()
    told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensors.shape[1:]}
    np.lib.format.write_array_header_1_0(start, told)
    header = np.frombuffer(start.getvalue(), np.uint8)
    values = np.ascontiguousarray(tensors, dtype).reshape(len(tensors), -1).view(np.uint8)
    cells = np.empty((len(values), header.size + values.shape[1]), np.uint8)
    cells[:, : header.size] = header
    cells[:, header.size :] = values
    edges = np.arange(len(cells) + 1, dtype=np.int32) * cells.shape[1]
    return pa.Array.from_buffers(pa.binary(), len(cells), [None, pa.py_buffer(edges), pa.py_buffer(cells)])


def _rows_alike(cells: Cells, rows: npt.NDArray[np.int64], header: Header) -> npt.NDArray[np.uint8] | None:
    """The values of ``rows`` as a strided view (rows, bytes); None unless all have this header, one behind another."""
    size = header.length + header.nbytes
    starts = cells.starts[rows]
    begin, end = int(starts[0]), int(starts[0]) + rows.size * size
    if end > cells.data.size or (starts != begin + np.arange(rows.size) * size).any():
        return None
    if (cells.stops[rows] - starts != size).any():
        return None
    found = cells.data[begin:end].reshape(rows.size, size)
    if (found[:, : header.length] != found[0, : header.length]).any():
        return None
    return found[:, header.length :]


def _header_length(start: bytes) -> int:
    if start[:6] != _MAGIC:
        raise ValueError(f"it begins with {start[:6]!r}")
    if start[6] == 1:
        return 10 + int.from_bytes(start[8:10], "little")
    return 12 + int.from_bytes(start[8:12], "little")


@lru_cache(maxsize=256)
def _parsed(header: bytes) -> Header:
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file, max_header_size=LONGEST_HEADER)
    return Header(dtype, tuple(shape), bool(fortran) and len(shape) > 1, len(header))
