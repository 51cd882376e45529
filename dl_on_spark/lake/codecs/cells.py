"""A binary column as memory: where each cell lies, and where its array goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


class BadCell(Exception):
    """A cell that cannot be read: its ``row`` in the chunk, and the ``problem``."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row, self.problem = row, problem


@dataclass(frozen=True)
class Cells:
    """Cell i is ``data[starts[i]:stops[i]]`` where ``valid[i]``; ``data``: uint8, a view of Arrow's memory."""

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, column: pa.Array) -> Cells:
        """The cells of one chunk of a binary column, without a copy."""
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_fixed_size_binary(column.type):
            column = column.cast(pa.binary())
        wide = pa.types.is_large_binary(column.type)
        _, offsets, data = column.buffers()
        edges = np.frombuffer(offsets, np.int64 if wide else np.int32) if offsets is not None else np.zeros(1, np.int32)
        edges = edges[column.offset : column.offset + len(column) + 1].astype(np.int64)
        memory = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        return cls(memory, edges[:-1], edges[1:], valid)

    def __iter__(self) -> Iterator[tuple[int, memoryview]]:
        """(row, bytes) of each cell that is no null."""
        for row in np.flatnonzero(self.valid).tolist():
            yield row, self.cell(row)

    def cell(self, row: int) -> memoryview:
        """The bytes of one cell."""
        return self.data[self.starts[row] : self.stops[row]].data


@dataclass(frozen=True)
class Target:
    """Arrays to fill, (rows, \\*shape). ``padded``: a smaller array of as many dimensions is put at the front."""

    values: Array
    padded: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""
        return self.values.shape[1:]

    def takes(self, row: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Raise `BadCell` unless an array of this type and shape has a place."""
        if dtype.newbyteorder("=") != self.dtype:
            raise BadCell(row, f"a tensor of {dtype} where the schema asks for {self.dtype}")
        if shape == self.shape:
            return
        if not self.padded:
            raise BadCell(row, f"a tensor of shape {list(shape)} where the schema asks for {list(self.shape)}")
        if len(shape) != len(self.shape) or any(a > b for a, b in zip(shape, self.shape, strict=True)):
            raise BadCell(row, f"a tensor of shape {list(shape)} where the schema asks for {list(self.shape)} at most")

    def put(self, row: int, array: Array) -> None:
        """Copy an array that `takes` let in to its row."""
        place: Any = (row, *(slice(size) for size in array.shape))
        self.values[place] = array
