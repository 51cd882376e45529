"""The rows of one rank: row groups become batches of NumPy arrays, step by step.

Row groups are decoded and preprocessed by a few threads (`prefetch`); this side only moves the rows
into batches, in shuffled order (`blocks`). No code runs per row.

**Memory.** A rank with S streams (``canonical_shards / world_size``) holds S windows in use, up to
``lookahead`` windows loaded ahead, and one decoded row group per thread: about
``(S + lookahead) × window × rows of a row group × bytes of a row``, whatever the table's size.
Blocks of batches add about 8 MiB each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.input_pipeline.blocks import StreamRows, WindowColumns, assemble, row_bytes, shuffled
from dl_on_spark.input_pipeline.plan import SamplePlan
from dl_on_spark.input_pipeline.prefetch import DecodePool, SharedRowGroups, WindowPrefetcher
from dl_on_spark.input_pipeline.preprocess import Batch, Columns, Preprocessor
from dl_on_spark.input_pipeline.windows import Window
from dl_on_spark.lake.row_groups import RowGroupDecoder
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.snapshot import Snapshot

if TYPE_CHECKING:
    from dl_on_spark.lake.statistics import Statistics

_BLOCK_BYTES = 8 * 2**20
_STEPS_AT_ONCE = 4_096


class RankReader:
    """Batches of one rank of a run, from any step of any epoch.

    ``threads``: how many decode (default: the usable cores, at most 4). ``lookahead``: windows
    loaded ahead of need (default: half the rank's streams, at least 2). ``deadline_s`` bounds each
    wait for storage. Raises `SchemaError` when the snapshot does not fit the schema.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: SamplePlan,
        schema: Schema,
        statistics: Statistics | None,
        rank: int,
        world_size: int,
        *,
        threads: int | None = None,
        lookahead: int | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        _check_same_rows(snapshot, plan)
        self.plan, self.schema, self.rank, self.world_size = plan, schema, rank, world_size
        self.preprocessor = Preprocessor(schema, statistics)
        self.failure: BaseException | None = None
        self._streams = plan.rank_streams(rank, world_size)
        self.snapshot = snapshot
        columns = schema.feed_columns
        schema.check(snapshot.schema, snapshot.uri, columns)
        self._lookahead = max(2, len(self._streams) // 2) if lookahead is None else lookahead
        self._deadline_s = deadline_s
        threads = threads or min(4, len(os.sched_getaffinity(0)))
        # Row groups side by side keep the threads busy; columns side by side as well would cost a tenth more.
        few = snapshot.num_row_groups < threads
        self._decoder = RowGroupDecoder(snapshot, columns, use_threads=few, dictionary_text=True)
        self._pool = DecodePool(threads)

    def __enter__(self) -> RankReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the decoding threads and close the files; waits at most ``deadline_s``."""
        self._pool.close(self._deadline_s)
        self._decoder.close()

    def rank_rows(self, step: int) -> int:
        """Rows of this rank's batch of ``step``."""
        return self.plan.rank_rows(step, self.rank, self.world_size)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """``(features, labels, weights)`` of each step of ``epoch`` from ``first_step`` on.

        Features: dict of name -> array (rows,) or (rows, \\*shape). Labels: one array, a dict when
        the schema has several, None when it has none. Weights: float32 (rows,) or None.
        """
        for block in self.blocks(epoch, first_step):
            for index in range(len(next(iter(block.values())))):
                yield self.preprocessor.split({name: values[index] for name, values in block.items()})

    def columns(self, epoch: int, first_step: int = 0) -> Iterator[Columns]:
        """As `batches`, but each batch is one dict of all columns by field name."""
        for block in self.blocks(epoch, first_step):
            for index in range(len(next(iter(block.values())))):
                yield {name: values[index] for name, values in block.items()}

    def blocks(self, epoch: int, first_step: int = 0) -> Iterator[Columns]:
        """Batches of several steps at once: arrays (steps, rows, \\*shape) by field name.

        A block holds consecutive steps in which this rank has equally many rows, so a step of
        another size is a block of its own.
        """
        self.plan.rows_before(first_step)
        try:
            yield from self._blocks(epoch, first_step)
        except Exception as error:
            # Kept because TensorFlow turns an exception inside a dataset into text.
            self.failure = error
            raise

    def _blocks(self, epoch: int, first_step: int) -> Iterator[Columns]:
        steps = self.plan.steps_per_epoch
        done = self.plan.stream_rows_before(np.asarray([first_step]), self._streams)[0]
        streams = self.plan.streams(epoch, self._streams)
        windows = [stream.windows(int(row)) for stream, row in zip(streams, done, strict=True)]
        # Streams advance in step with each other: a window is needed when its stream reaches its first row.
        in_need = sorted(
            (w for found in windows for w in found), key=lambda w: (max(w.first_row, done.min()), w.stream)
        )

        longest = _BLOCK_BYTES // max(1, row_bytes(self.preprocessor.tensor_specs()))

        def load(window: Window, groups: SharedRowGroups) -> WindowColumns:
            return self._load(window, groups, epoch)

        with WindowPrefetcher(
            in_need,
            self._pool,
            SharedRowGroups(self._decode),
            load,
            lookahead=self._lookahead,
            deadline_s=self._deadline_s,
        ) as prefetcher:
            prefetcher.queue(len(windows) + self._lookahead)
            rows = [StreamRows(found, int(row), prefetcher) for found, row in zip(windows, done, strict=True)]
            for at in range(first_step, steps, _STEPS_AT_ONCE):
                edges = np.arange(at, min(at + _STEPS_AT_ONCE, steps) + 1)
                counts = np.diff(self.plan.stream_rows_before(edges, self._streams), axis=0)
                for run in _equal_runs(counts.sum(axis=1), longest):
                    yield assemble(rows, counts[run])

    def _decode(self, group: int) -> pa.Table:
        table = self._decoder.decode(group)
        expected = self.plan.group_rows[group]
        if table.num_rows != expected:
            raise TableError(
                f"{self._name(group)} has {table.num_rows} rows; the pinned snapshot has {expected}. "
                "The file was changed after the run began.",
                fix="Start a new run, which pins the table as it is now.",
            )
        return table

    def _load(self, window: Window, groups: SharedRowGroups, epoch: int) -> WindowColumns:
        pieces = [groups.table(s.group).slice(s.start, s.rows) for s in window.segments]
        table = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
        try:
            columns = self.preprocessor.apply_encoded(table, source=self._name(window.segments[0].group))
        except SchemaError:
            for segment in window.segments:  # which of them it is; in whole row groups rows count from the start
                whole = groups.table(segment.group)
                self.preprocessor.apply_encoded(whole, source=self._name(segment.group))
            raise
        return shuffled(columns, window.row_order(self.plan.seed, epoch))

    def _name(self, group: int) -> str:
        groups = self.snapshot.row_groups
        path = self.snapshot.files[int(groups.file[group])].path or self.snapshot.uri
        # Rows are counted among those that are left where some are not: say so.
        left = "" if groups.rows[group] == groups.stored_rows[group] else " (without rows that are filtered out)"
        return f"{path}, row group {int(groups.index[group])}{left}"


def _check_same_rows(snapshot: Snapshot, plan: SamplePlan) -> None:
    if not np.array_equal(np.asarray(plan.group_rows, dtype=np.int64), snapshot.row_groups.rows):
        raise TableError(
            f"The sample plan was made for another snapshot than this one of {snapshot.uri}: "
            f"{plan.rows} rows in {len(plan.group_rows)} row groups against "
            f"{snapshot.rows} in {snapshot.num_row_groups}.",
            fix="Load the snapshot that was stored with the plan, or plan anew.",
        )


def _equal_runs(rows: npt.NDArray[np.int64], longest: int) -> Iterator[slice]:
    """Cut steps into runs of equally many rows, each of ``longest`` rows at most, if a step is not more."""
    edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), len(rows)]
    for first, last in pairwise(edges):
        steps = max(1, longest // int(rows[first]))
        for at in range(first, last, steps):
            yield slice(at, min(at + steps, last))
