"""Blocks: the batches of several steps, gathered from the windows of a rank's streams.

The shuffle and the copy into batches are one pass: a window stays in the order of its row groups,
often as a view of Arrow's memory, and its rows are moved once, by the window's row order. All
arrays of a block lie in one allocation, aligned so that TensorFlow uses them where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.input_pipeline.prefetch import WindowPrefetcher
from dl_on_spark.input_pipeline.preprocess import Columns
from dl_on_spark.input_pipeline.tensors import Array, EncodedText, Rows
from dl_on_spark.input_pipeline.windows import Window

_ALIGNMENT = 64
Counts = npt.NDArray[np.int64]
WindowColumns = dict[str, Array | EncodedText]


def shuffled(columns: WindowColumns, order: Rows | None) -> WindowColumns:
    """The columns with their rows in ``order``; text stays encoded."""
    if order is None:
        return columns
    codes = {name: c.codes if isinstance(c, EncodedText) else c for name, c in columns.items()}
    moved = allocate({name: (values.shape, values.dtype) for name, values in codes.items()})
    for name, values in codes.items():
        # "clip" spares the bounds check and the buffer that "raise" needs: rows are in bounds.
        values.take(order, axis=0, out=moved[name], mode="clip")
    texts = {name: c.with_codes(moved[name]) for name, c in columns.items() if isinstance(c, EncodedText)}
    return {**moved, **texts}


class StreamRows:
    """The rows of one stream, in order: loads window after window."""

    def __init__(self, windows: list[Window], row: int, prefetcher: WindowPrefetcher[WindowColumns]) -> None:
        self._windows, self._prefetcher = iter(windows), prefetcher
        self._skip = row - windows[0].first_row if windows else 0
        self._columns: WindowColumns = {}
        self._at = self._rows = 0

    def take(self, count: int) -> list[Columns]:
        """The next ``count`` rows, as views of one window or of several."""
        pieces = []
        while count:
            if self._at == self._rows:
                self._columns = {}  # free the used window before the wait for the next
                window = next(self._windows)
                self._columns = self._prefetcher.take(window)
                self._at, self._rows, self._skip = self._skip, window.rows, 0
            stop = min(self._at + count, self._rows)
            pieces.append({name: values[self._at : stop] for name, values in self._columns.items()})
            count -= stop - self._at
            self._at = stop
        return pieces


def assemble(streams: Sequence[StreamRows], counts: Counts) -> Columns:
    """One block: for each step its rows of each stream, in stream order. ``counts``: (steps, streams)."""
    steps, rows = len(counts), int(counts[0].sum())
    parts = [stream.take(int(total)) for stream, total in zip(streams, counts.sum(axis=0), strict=True)]
    block = allocate({n: ((steps, rows, *v.shape[1:]), v.dtype) for n, v in parts[0][0].items()})
    uneven = None if (counts == counts[0]).all() else _step_order(counts)
    for name, target in block.items():
        if uneven is None:
            column = 0
            for part, count in zip(parts, counts[0].tolist(), strict=True):
                values = part[0][name] if len(part) == 1 else np.concatenate([piece[name] for piece in part])
                target[:, column : column + count] = values.reshape(steps, count, *target.shape[2:])
                column += count
        else:
            values = np.concatenate([piece[name] for part in parts for piece in part])
            values.take(uneven, axis=0, out=target.reshape(values.shape), mode="clip")
    return block


def row_bytes(specs: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """Bytes of one row of a block with these tensor specs; a text counts as its pointer."""
    return sum(int(np.prod(shape)) * _dtype_of(dtype).itemsize for shape, dtype in specs.values())


def _dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(object if name == "string" else name)


def _step_order(counts: Counts) -> Rows:
    """Which row, counted in stream order, each row in step order is."""
    steps = np.arange(len(counts))
    return np.argsort(np.concatenate([np.repeat(steps, column) for column in counts.T]), kind="stable")


def allocate(wanted: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Columns:
    """Uninitialized arrays of these shapes and types, all numbers in one aligned allocation.

    From Arrow's memory pool, which reuses freed memory, where each larger array of NumPy's own
    costs a page fault every 4 KB.
    """
    sizes = {n: 0 if t.hasobject else math.prod(shape) * t.itemsize for n, (shape, t) in wanted.items()}
    offsets = dict(zip(sizes, accumulate((_aligned(s) for s in sizes.values()), initial=0), strict=False))
    memory = pa.allocate_buffer(sum(map(_aligned, sizes.values())), resizable=False)
    return {
        name: np.empty(shape, dtype) if dtype.hasobject else np.ndarray(shape, dtype, memory, offsets[name])
        for name, (shape, dtype) in wanted.items()
    }


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
