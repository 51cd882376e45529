"""Tensors in binary columns: each codec turns a column of encoded cells into one array, and back.

| codec | a cell is | as petastorm's |
|---|---|---|
| ndarray | the bytes of an .npy file | NdarrayCodec |
| compressed_ndarray | an .npz file with one array ``arr`` | CompressedNdarrayCodec |
| png, jpeg | an image (extra ``images``) | CompressedImageCodec |

No codec runs what a cell says: object arrays, which only unpickling could read, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import SchemaError
from dl_on_spark.lake.codecs import images, npy, npz
from dl_on_spark.lake.codecs.cells import BadCell, Cells, Target
from dl_on_spark.lake.schema import Field
from dl_on_spark.lake.tensor_columns import TENSOR_CODECS

Array = npt.NDArray[Any]
_CHUNK_BYTES = 2**30  # a binary array counts its bytes in 31 bits


class Codec(Protocol):
    """What a codec's module offers."""

    def decode(self, cells: Cells, target: Target) -> None:
        """Fill ``target`` with the arrays of ``cells``; raises `BadCell` for the first that is none."""

    def encode(self, values: Array, dtype: np.dtype[Any]) -> bytes:
        """The cell of one array."""


_CODECS: dict[str, Codec] = {
    "ndarray": npy,
    "compressed_ndarray": npz,
    "png": images.Images("png"),
    "jpeg": images.Images("jpeg"),
}
assert set(_CODECS) == TENSOR_CODECS


@dataclass(frozen=True)
class TensorSpec:
    """What a cell must hold: ``shape`` exactly, or at most where ``pad`` fills the rest up."""

    codec: str
    dtype: str
    shape: tuple[int, ...]
    pad: Any = None

    @classmethod
    def of(cls, field: Field) -> TensorSpec:
        """The tensor of a schema's field that has a codec."""
        shape, dtype = field.tensor_spec()
        assert field.codec is not None
        return cls(field.codec, dtype, shape, field.pad)


def decode(column: pa.ChunkedArray, spec: TensorSpec, where: str) -> pa.Array:
    """The column's tensors as flat values, ``rows × prod(shape)`` of them; a null cell becomes nulls.

    Cells of equal headers are moved by one copy per chunk. Raises `SchemaError` naming `where`, the row in the
    column and what is wrong for a cell that is damaged, of another dtype or shape, or an object array.
    """
    rows, size = len(column), int(np.prod(spec.shape))
    dtype = np.dtype(spec.dtype)
    memory = pa.allocate_buffer(rows * size * dtype.itemsize)  # from a pool: a new NumPy array faults in each page
    values = np.ndarray((rows, *spec.shape), dtype, memory)
    if spec.pad is not None:
        values[...] = spec.pad
    valid = np.ones(rows, bool)
    at = 0
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        cells, part = Cells.of(chunk), values[at : at + len(chunk)]
        if not cells.valid.all():
            valid[at : at + len(chunk)] = cells.valid
            part[~cells.valid] = 0
        try:
            _CODECS[spec.codec].decode(cells, Target(part, spec.pad is not None))
        except BadCell as bad:
            raise SchemaError(
                f"{where}, row {at + bad.row}: {bad.problem}.",
                fix="Correct codec, dtype and shape in the schema, or write this row again.",
            ) from bad
        at += len(chunk)
    missing = None if valid.all() else np.repeat(~valid, size)
    return pa.array(values.reshape(-1), mask=missing)


def encode(tensors: Array | Sequence[Array | None], spec: TensorSpec, where: str) -> pa.ChunkedArray:
    """A binary column of one cell a row. ``tensors``: (rows, \\*shape), or arrays one by one, None for a null.

    Raises `SchemaError` naming `where` and the row for a tensor of another dtype or shape.
    """
    dtype, codec = np.dtype(spec.dtype), _CODECS[spec.codec]
    if isinstance(tensors, np.ndarray) and len(tensors):
        _check(tensors[0], spec, f"{where}, row 0")
        if codec is npy:
            step = max(1, _CHUNK_BYTES // (tensors[0].nbytes + npy.LONGEST_HEADER))
            chunks = [npy.encode_rows(tensors[i : i + step], dtype) for i in range(0, len(tensors), step)]
            return pa.chunked_array(chunks)
    cells: list[bytes | None] = []
    for row, values in enumerate(tensors):
        if values is not None:
            _check(values, spec, f"{where}, row {row}")
        cells.append(None if values is None else codec.encode(values, dtype))
    return pa.chunked_array(_binary(cells), pa.binary())


def _binary(cells: list[bytes | None]) -> list[pa.Array]:
    ends = np.cumsum([len(cell or b"") for cell in cells])
    full = np.arange(_CHUNK_BYTES, int(ends[-1]) + 1, _CHUNK_BYTES) if cells else np.zeros(0)
    edges = [0, *np.searchsorted(ends, full).tolist(), len(cells)]
    return [pa.array(cells[a:b], pa.binary()) for a, b in pairwise(edges)]


def _check(values: Array, spec: TensorSpec, where: str) -> None:
    wanted = np.dtype(spec.dtype)
    padded = spec.pad is not None and values.ndim == len(spec.shape)
    fits = all(a <= b for a, b in zip(values.shape, spec.shape, strict=True)) if padded else values.shape == spec.shape
    if values.dtype != wanted or not fits:
        raise SchemaError(
            f"{where}: a tensor {values.dtype} {list(values.shape)} where the schema asks for "
            f"{wanted} {list(spec.shape)}.",
            fix="Convert it, or correct dtype and shape in the schema.",
        )
