"""Which row goes to which worker in which step: the sample plan.

The plan is a pure function of the row counts of the row groups and a seed. All ranks compute the
same plan from the same JSON, so no rank asks another one what to read.

**Dealing rule.** An epoch's row groups, in the epoch's order, form one sequence of N rows. It is
cut into C = ``canonical_shards`` streams, each a contiguous slice; stream c has
``N // C + (c < N % C)`` rows. After t rows of an epoch have been trained on, stream c has given
``t // C + (c < t % C)`` of them. A step is a range of t, so each global batch takes equally from
all streams (±1) and depends on neither the rank nor the world size. A rank serves a contiguous
run of whole streams.

**Steps.** ``ceil(N / global_batch_size)``; a last remainder smaller than C is folded into the step
before, so each stream, and with it each rank, has at least one row in every step. Nothing is
padded, dropped or repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import InputError
from dl_on_spark.input_pipeline.windows import Stream, epoch_order, meeting_neighbours, stream_of

_MIN_SHARDS = 8
_SHUFFLE_ROWS = 16_384


@dataclass(frozen=True, order=True)
class Cursor:
    """A position in training: the next step to run is ``step`` of ``epoch`` (both from 0)."""

    epoch: int
    step: int


@dataclass(frozen=True)
class SamplePlan:
    """The plan of a run; make one with `SamplePlan.create`, ship it with `to_json`.

    ``group_rows``: rows of each row group of the snapshot, in the snapshot's order.
    ``global_batch_size``: rows of one optimizer step over all workers.
    ``canonical_shards``: number of streams (C above). ``seed``: None keeps the file order.
    ``window``: how many consecutive row groups of a stream are shuffled together.
    """

    group_rows: tuple[int, ...]
    global_batch_size: int
    canonical_shards: int
    window: int
    seed: int | None

    @classmethod
    def create(
        cls,
        group_rows: Sequence[int] | npt.NDArray[np.int64],
        *,
        num_workers: int,
        global_batch_size: int,
        seed: int | None,
        canonical_shards: int | None = None,
        window: int | None = None,
    ) -> SamplePlan:
        """Plan for row groups of ``group_rows`` rows.

        ``canonical_shards`` defaults to the least multiple of ``num_workers`` that is at least 8,
        or its greatest divisor that fits the rows and the batch. ``window`` defaults to as many row
        groups as hold about 16,000 rows of one stream (1 without a seed). A rank with S streams
        holds about S × window decoded row groups, so lower the window where rows are large.

        Raises `InputError` when there are no rows, fewer rows than workers, or a batch smaller
        than the number of workers.
        """
        rows_of = np.asarray(group_rows, dtype=np.int64).reshape(-1)
        rows = int(rows_of.sum())
        _check_counts(rows, num_workers, global_batch_size, seed)
        limit = min(rows, global_batch_size)
        shards = _default_shards(num_workers, limit) if canonical_shards is None else canonical_shards
        if not num_workers <= shards <= limit:
            raise InputError(
                f"canonical_shards={shards} does not fit: it must be from {num_workers} (num_workers) "
                f"to {limit} (the smaller of {rows} rows and global_batch_size={global_batch_size}).",
                fix="Leave canonical_shards unset, or choose a value in that range.",
            )
        if window is None:
            window = 1 if seed is None else _default_window(rows_of, shards)
        if window < 1:
            raise InputError(f"window={window} is not a number of row groups.", fix="Use 1 or more.")
        return cls(tuple(rows_of.tolist()), global_batch_size, shards, window, seed)

    @cached_property
    def rows(self) -> int:
        """Rows of one epoch."""
        return sum(self.group_rows)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the same on every rank."""
        steps, rest = divmod(self.rows, self.global_batch_size)
        return steps + (rest >= self.canonical_shards or steps == 0)

    def rows_before(self, step: int) -> int:
        """Global rows of an epoch that are done before ``step`` begins (t of the dealing rule)."""
        if not 0 <= step <= self.steps_per_epoch:
            raise InputError(f"step {step} is not in an epoch of {self.steps_per_epoch} steps.")
        return self.rows if step == self.steps_per_epoch else step * self.global_batch_size

    def step_rows(self, step: int) -> int:
        """Rows of the global batch of ``step``."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rank_streams(self, rank: int, world_size: int) -> range:
        """The streams that ``rank`` serves: a contiguous run, never empty."""
        if not 1 <= world_size <= self.canonical_shards:
            raise InputError(
                f"{world_size} workers cannot share {self.canonical_shards} streams (canonical_shards).",
                fix=f"Use at most {self.canonical_shards} workers, or plan a new run with more workers.",
            )
        if not 0 <= rank < world_size:
            raise InputError(f"rank {rank} is not in a world of {world_size} workers.")
        shards = self.canonical_shards
        return range(rank * shards // world_size, (rank + 1) * shards // world_size)

    def rank_rows(self, step: int, rank: int, world_size: int) -> int:
        """Rows that ``rank`` contributes to the global batch of ``step``; at least one."""
        streams = self.rank_streams(rank, world_size)
        before, after = self.rows_before(step), self.rows_before(step + 1)
        return int(
            self._dealt_to_first(after, streams.stop)
            - self._dealt_to_first(after, streams.start)
            - self._dealt_to_first(before, streams.stop)
            + self._dealt_to_first(before, streams.start)
        )

    def shares(self, step: int, world_size: int) -> npt.NDArray[np.float64]:
        """``rank_rows / step_rows`` of every rank: the weights of their gradients. Sums to 1."""
        counts = [self.rank_rows(step, rank, world_size) for rank in range(world_size)]
        return np.asarray(counts, dtype=np.float64) / self.step_rows(step)

    def stream_rows_before(self, steps: npt.NDArray[np.int64], streams: range) -> npt.NDArray[np.int64]:
        """Rows each stream has given before each step: shape (len(steps), len(streams))."""
        done = np.minimum(steps * self.global_batch_size, self.rows)
        done[steps == self.steps_per_epoch] = self.rows
        quotient, remainder = np.divmod(done, self.canonical_shards)
        extra = np.arange(streams.start, streams.stop)[None, :] < remainder[:, None]
        return np.asarray(quotient[:, None] + extra, dtype=np.int64)

    def streams(self, epoch: int, streams: range | None = None) -> list[Stream]:
        """The windows of the given streams (default: all) in ``epoch``."""
        chosen = range(self.canonical_shards) if streams is None else streams
        order, ends = epoch_order(np.asarray(self.group_rows, dtype=np.int64), self.seed, epoch)
        bounds = [self._stream_start(index) for index in range(chosen.start, chosen.stop + 1)]
        found = [
            stream_of(index, bounds[at], bounds[at + 1], order, ends, self.window) for at, index in enumerate(chosen)
        ]
        return found if self.seed is None else [meeting_neighbours(stream) for stream in found]

    def next_cursor(self, cursor: Cursor) -> Cursor:
        """The cursor after the step at ``cursor``; the last step leads to the next epoch."""
        if cursor.step + 1 >= self.steps_per_epoch:
            return Cursor(cursor.epoch + 1, 0)
        return Cursor(cursor.epoch, cursor.step + 1)

    def to_json(self) -> str:
        """All of the plan as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SamplePlan:
        """The plan that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "group_rows": tuple(fields["group_rows"])})

    def _stream_start(self, stream: int) -> int:
        quotient, remainder = divmod(self.rows, self.canonical_shards)
        return stream * quotient + min(stream, remainder)

    def _dealt_to_first(self, done: int, streams: int) -> int:
        """Rows the first ``streams`` streams have given together after ``done`` global rows."""
        quotient, remainder = divmod(done, self.canonical_shards)
        return streams * quotient + min(streams, remainder)


def _check_counts(rows: int, num_workers: int, global_batch_size: int, seed: int | None) -> None:
    if num_workers < 1:
        raise InputError(f"num_workers={num_workers} is not a number of workers.", fix="Use 1 or more.")
    if rows == 0:
        raise InputError(
            "The table has no rows to train on.",
            fix="Check the table's location and its filter (`where`), or run the ETL for these days first.",
        )
    if rows < num_workers:
        raise InputError(
            f"{num_workers} workers need at least {num_workers} rows; the table has {rows}.",
            fix=f"Use num_workers={rows} or fewer, or a wider filter.",
        )
    if global_batch_size < num_workers:
        raise InputError(
            f"global_batch_size={global_batch_size} is smaller than num_workers={num_workers}, so some "
            "worker would have no row in a step.",
            fix=f"Use global_batch_size={num_workers} or more: it counts rows per step over all workers.",
        )
    if seed is not None and seed < 0:
        raise InputError(f"seed={seed} is negative.", fix="Use 0 or more, or None for the file order.")


def _default_shards(num_workers: int, limit: int) -> int:
    least = -(-_MIN_SHARDS // num_workers) * num_workers
    # A divisor of the usual count, not just any smaller one: so 1, 2 and 4 workers still agree.
    fitting = (n for n in range(num_workers, least + 1, num_workers) if least % n == 0 and n <= limit)
    return max(fitting)


def _default_window(group_rows: npt.NDArray[np.int64], shards: int) -> int:
    # A stream boundary cuts a row group in two, so there are up to shards − 1 more segments than groups.
    segments = int(np.count_nonzero(group_rows)) + shards - 1
    return max(1, round(_SHUFFLE_ROWS * segments / int(group_rows.sum())))
