"""Blocks of batches as tensors, for a loop that runs several steps in one `tf.function`.

A block crosses from NumPy to TensorFlow once, numbers without a copy, and the loop takes step i of it
by a slice along the first axis, which shares its memory. Against `tf_dataset` this spares each step
an iterator's hop between threads and a copy of every column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any

from dl_on_spark.errors import DLOnSparkError
from dl_on_spark.input_pipeline.plan import Cursor
from dl_on_spark.input_pipeline.prefetch import DecodePool
from dl_on_spark.input_pipeline.preprocess import Columns, Preprocessor

_ALIGNMENT = 64  # of TensorFlow's kernels


class BlockFeed:
    """Batches from any cursor to its epoch's end, block by block; the next block is made in a thread.

    ``blocks(epoch, first_step)`` gives arrays (steps, rows, \\*shape) by field name, as `RankReader.blocks`
    does. ``element_spec`` describes one batch: ``(x, y)``, ``(x, y, weights)`` or ``x`` of tensors
    (rows, \\*shape), rows unknown; ``block_spec`` a block of them. ``deadline_s`` bounds the wait for one.
    """

    def __init__(
        self, blocks: Callable[[int, int], Iterator[Columns]], preprocessor: Preprocessor, *, deadline_s: float = 600.0
    ) -> None:
        self._source, self._preprocessor, self._deadline_s = blocks, preprocessor, deadline_s
        self._pool = DecodePool(1)
        self._blocks: Iterator[tuple[Any, int]] | None = None
        self._next: Future[tuple[Any, int] | None] | None = None
        self._block: Any = None
        self._at = self._steps = 0
        self.seconds_waiting = 0.0  # in `take`, for blocks that were not ready
        self.element_spec = self._specs((None,))
        self.block_spec = self._specs((None, None))

    def __enter__(self) -> BlockFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._drop()
        self._pool.close(self._deadline_s)

    def seek(self, cursor: Cursor) -> None:
        """The next step that `take` gives is the cursor's."""
        self._drop()
        self._blocks = self._tensors(cursor)
        self._queue()

    def take(self, most: int) -> tuple[Any, int, int]:
        """``(block, first, count)``: the next steps, ``count`` of them and at most ``most``, begin at step
        ``first`` of the block. Raises what the reader raised; IndexError at the epoch's end."""
        if self._at == self._steps:
            self._block = None  # free the used block before the wait for the next
            began = time.perf_counter()
            self._block, self._steps = self._wait()
            self.seconds_waiting += time.perf_counter() - began
            self._at = 0
            self._queue()
        first, count = self._at, min(most, self._steps - self._at)
        self._at += count
        return self._block, first, count

    def _tensors(self, cursor: Cursor) -> Iterator[tuple[Any, int]]:
        for block in self._source(cursor.epoch, cursor.step):
            steps = len(next(iter(block.values())))
            yield self._preprocessor.element({name: _tensor(values) for name, values in block.items()}), steps

    def _queue(self) -> None:
        blocks = self._blocks
        assert blocks is not None, "seek comes before take"
        self._next = self._pool.submit(lambda: next(blocks, None))

    def _wait(self) -> tuple[Any, int]:
        assert self._next is not None, "seek comes before take"
        try:
            found = self._next.result(timeout=self._deadline_s)
        except FutureTimeout:
            if self._next.done():
                raise
            raise DLOnSparkError(
                f"The next block of batches was not ready within {self._deadline_s:g} s.",
                fix="Check that the table's storage answers, or raise deadline_s.",
            ) from None
        if found is None:
            raise IndexError("The epoch has no more steps.")
        return found

    def _drop(self) -> None:
        """Forget the blocks of the last `seek`; their files and windows are freed in the feed's thread."""
        if self._next is not None:
            self._next.cancel()
        if self._blocks is not None:
            self._pool.submit(self._blocks.close)  # type: ignore[attr-defined]
        self._block = self._blocks = self._next = None
        self._at = self._steps = 0

    def _specs(self, leading: tuple[None, ...]) -> Any:
        import tensorflow as tf

        specs = self._preprocessor.tensor_specs().items()
        return self._preprocessor.element(
            {name: tf.TensorSpec((*leading, *shape), tf.as_dtype(dtype), name=name) for name, (shape, dtype) in specs}
        )


def step_of(block: Any, index: Any) -> Any:
    """Batch ``index`` (int32 scalar) of a block, inside a `tf.function`: slices that share the block's memory."""
    import tensorflow as tf

    begin = tf.reshape(index, [1])
    end, stride = begin + 1, tf.constant([1])
    return tf.nest.map_structure(lambda v: tf.strided_slice(v, begin, end, stride, shrink_axis_mask=1), block)


def _tensor(values: Any) -> Any:
    import tensorflow as tf

    if values.dtype.kind in "iuf" and values.flags.writeable and values.ctypes.data % _ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())  # shares the memory
    return tf.convert_to_tensor(values)
