"""Where arriving bytes go: straight into the array, or through scratch space into a sum."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dl_on_spark.collectives.reduction import Array, Combine

SEGMENT_BYTES = 256 * 1024
"""A sum is made segment by segment, while the segment is still in the cache."""


class Sink(Protocol):
    """Takes ``nbytes`` bytes in order."""

    nbytes: int

    def window(self) -> memoryview:
        """Where the next bytes belong; empty when all have come."""
        ...

    def advance(self, count: int) -> None:
        """``count`` bytes were written to the window."""
        ...

    def finish(self) -> None:
        """All bytes came, and what this rank sends in the same step has left."""
        ...


class Replace:
    """Bytes go to their place; nothing is copied."""

    def __init__(self, target: memoryview) -> None:
        self.nbytes = len(target)
        self._target = target
        self._filled = 0

    def window(self) -> memoryview:
        """The rest of the target."""
        return self._target[self._filled :] if self._filled else self._target

    def advance(self, count: int) -> None:
        """Move on."""
        self._filled += count

    def finish(self) -> None:
        """Nothing is left to do."""


class Reduce:
    """Bytes go to scratch space and are combined with the target, the lower rank's value first.

    ``at_once`` says that the target is not being sent in this step, so that a segment may be
    combined as soon as it is whole; otherwise all is combined at the end.
    """

    def __init__(self, target: Array, combine: Combine, scratch: Array, *, peer_first: bool, at_once: bool) -> None:
        self.nbytes = target.nbytes
        self._target = target
        self._combine = combine
        self._peer_first = peer_first
        segment = max(1, SEGMENT_BYTES // target.itemsize) if at_once else max(1, len(target))
        self._scratch = scratch[: min(segment, len(target))]
        self._bytes = self._scratch.view(np.uint8).data
        self._filled = 0
        self._done = 0

    def window(self) -> memoryview:
        """The rest of the scratch segment."""
        left = self.nbytes - self._done * self._target.itemsize
        return self._bytes[self._filled : left] if self._filled or left < len(self._bytes) else self._bytes

    def advance(self, count: int) -> None:
        """Combine the segment when it is full and is not the last."""
        self._filled += count
        if self._filled == len(self._bytes) and self._filled < self.nbytes:
            self._flush()

    def finish(self) -> None:
        """Combine what is left."""
        if self._filled:
            self._flush()

    def _flush(self) -> None:
        count = self._filled // self._target.itemsize
        mine = self._target[self._done : self._done + count]
        theirs = self._scratch[:count]
        if self._peer_first:
            self._combine(theirs, mine, out=mine)
        else:
            self._combine(mine, theirs, out=mine)
        self._done += count
        self._filled = 0


def scratch_elements(target: Array, *, at_once: bool) -> int:
    """Elements of scratch space that ``Reduce`` needs."""
    return min(len(target), max(1, SEGMENT_BYTES // target.itemsize)) if at_once else len(target)
