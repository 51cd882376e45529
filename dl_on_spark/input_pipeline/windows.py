"""An epoch's order: row groups permuted, cut into streams, shuffled inside windows.

Pure functions of (seed, epoch, stream, window), so any position of any epoch is found without
reading what comes before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

# The first word of each random seed: keeps the draws of the two kinds of permutation apart.
_GROUP_ORDER, _ROW_ORDER = 1, 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``start`` to ``stop`` (exclusive) of row group ``group``."""

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Consecutive segments of a stream whose rows are shuffled together.

    ``first_row``: how many rows of the stream come before this window.
    """

    stream: int
    index: int
    first_row: int
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Rows of the window."""
        return sum(segment.rows for segment in self.segments)

    def row_order(self, seed: int | None, epoch: int) -> Rows | None:
        """The shuffle: row i of the window is row ``row_order[i]`` of its segments in file order.

        None without a seed: the rows stay in file order.
        """
        if seed is None:
            return None
        return _generator(_ROW_ORDER, seed, epoch, self.stream, self.index).permutation(self.rows)


@dataclass(frozen=True)
class Stream:
    """One canonical shard of an epoch: segments, in order, grouped by ``window`` into windows."""

    index: int
    segments: tuple[Segment, ...]
    window: int

    @property
    def rows(self) -> int:
        """Rows of the stream."""
        return sum(segment.rows for segment in self.segments)

    def windows(self, from_row: int = 0) -> list[Window]:
        """The windows that hold row ``from_row`` of the stream and all later rows."""
        found, row = [], 0
        for index, at in enumerate(range(0, len(self.segments), self.window)):
            window = Window(self.index, index, row, self.segments[at : at + self.window])
            row += window.rows
            if row > from_row:
                found.append(window)
        return found


def epoch_order(group_rows: Rows, seed: int | None, epoch: int) -> tuple[Rows, Rows]:
    """The epoch's row groups, in order, and the running sum of their rows: two arrays (groups,).

    Empty row groups are left out before the draw: they change nothing about an epoch.
    """
    order = np.flatnonzero(group_rows)
    if seed is not None:
        order = _generator(_GROUP_ORDER, seed, epoch).permutation(order)
    return order, np.cumsum(group_rows[order])


def stream_of(index: int, first: int, last: int, order: Rows, ends: Rows, window: int) -> Stream:
    """Rows ``first`` to ``last`` (exclusive) of the epoch's sequence as stream ``index``."""
    low, high = np.searchsorted(ends, (first, last - 1), side="right")
    groups, stops = order[low : high + 1], ends[low : high + 1]
    begins = np.concatenate(([ends[low - 1] if low else 0], stops[:-1]))
    starts = np.maximum(begins, first) - begins
    stops = np.minimum(stops, last) - begins
    segments = map(Segment, groups.tolist(), starts.tolist(), stops.tolist())
    return Stream(index, tuple(segments), window)


def meeting_neighbours(stream: Stream) -> Stream:
    """The stream with its first and last segments moved to the front, so that neighbours meet there.

    A row group cut by the boundary of two streams is the last segment of one and the first of the next. Even
    streams begin with their last segment and odd ones with their first, and the other end comes second: both
    parts of such a group are needed at the same time, and a rank that has both streams decodes it once.
    """
    first, last = stream.segments[:1], stream.segments[1:][-1:]
    front = first + last if stream.index % 2 else last + first
    return replace(stream, segments=front + stream.segments[1:-1])


def _generator(kind: int, seed: int, *words: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((kind, seed, *words))))
