"""Where the rows of one batch lie: what an error about a batch says of it."""

from __future__ import annotations

import numpy as np

from dl_on_spark.input_pipeline.plan import Cursor, SamplePlan
from dl_on_spark.input_pipeline.windows import Window
from dl_on_spark.lake.snapshot import Snapshot

_NAMED = 4


def batch_rows(plan: SamplePlan, cursor: Cursor, rank: int, world_size: int) -> dict[int, np.ndarray]:
    """Rows of the rank's batch at `cursor` by row group: positions in the row group, sorted, shape (n,)."""
    streams = plan.rank_streams(rank, world_size)
    edges = plan.stream_rows_before(np.asarray([cursor.step, cursor.step + 1]), streams)
    found: dict[int, list[np.ndarray]] = {}
    for stream, first, last in zip(plan.streams(cursor.epoch, streams), *edges.tolist(), strict=True):
        for window in stream.windows(first):
            if window.first_row >= last:
                break
            chosen = slice(max(first - window.first_row, 0), last - window.first_row)
            _collect(found, window, _order(plan, window, cursor.epoch)[chosen])
    return {group: np.sort(np.concatenate(rows)) for group, rows in found.items()}


def describe_batch(plan: SamplePlan, snapshot: Snapshot, cursor: Cursor, rank: int, world_size: int) -> str:
    """How many rows the rank's batch at `cursor` has, and the files and row groups that most of them are of."""
    by_group = batch_rows(plan, cursor, rank, world_size)
    groups = snapshot.row_groups
    largest = sorted(by_group, key=lambda group: (-len(by_group[group]), group))[:_NAMED]
    named = []
    for group in largest:
        rows = by_group[group]
        path = snapshot.files[int(groups.file[group])].path or snapshot.uri
        place = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of rows {rows[0]} to {rows[-1]}"
        named.append(f"{path}, row group {int(groups.index[group])}: {place}")
    more = f"; and {len(by_group) - len(largest)} more row groups" if len(by_group) > len(largest) else ""
    return f"{sum(map(len, by_group.values()))} rows ({'; '.join(named)}{more})"


def _order(plan: SamplePlan, window: Window, epoch: int) -> np.ndarray:
    order = window.row_order(plan.seed, epoch)
    return np.arange(window.rows) if order is None else order


def _collect(found: dict[int, list[np.ndarray]], window: Window, rows: np.ndarray) -> None:
    """Rows of a window, counted over its segments, go to their row groups."""
    start = 0
    for segment in window.segments:
        own = rows[(rows >= start) & (rows < start + segment.rows)]
        if len(own):
            found.setdefault(segment.group, []).append(own - start + segment.start)
        start += segment.rows
