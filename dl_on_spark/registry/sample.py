"""A bounded number of a snapshot's rows on the driver, the same ones however often they are asked for.

Of each row group a share is drawn by a generator whose seed is the row group's number, so two models are judged on the
same rows, in the same order, and nobody's choice of rows can favour one of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.lake import RowGroupDecoder, Snapshot
from dl_on_spark.registry.predictions import SavedModel, drawn, map_predictions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAMPLE_ROWS = 100_000
_CELLS = 20_000_000  # of rows times columns: a wide table gives fewer rows
_COLUMN = "sample binary"


def scored_sample(
    spark: SparkSession, model: SavedModel, snapshot: Snapshot, columns: Sequence[str], rows: int = SAMPLE_ROWS
) -> tuple[pa.Table, npt.NDArray[np.float32]]:
    """About `rows` rows with `columns`, and the model's scores of them: all rows where there are no more."""

    def result(kept: pa.Table, scores: npt.NDArray[np.float32]) -> Iterator[pa.RecordBatch]:
        yield _packed(kept.append_column("", pa.array(scores)))

    share = _share(snapshot, rows, len(columns))
    found = map_predictions(spark, model, snapshot, columns, result, _COLUMN, share=share).collect()
    table = _unpacked(found)
    scores = np.asarray(table.column(table.num_columns - 1), dtype=np.float32)
    return table.remove_column(table.num_columns - 1), scores


def sample(spark: SparkSession, snapshot: Snapshot, columns: Sequence[str], rows: int = SAMPLE_ROWS) -> pa.Table:
    """About `rows` rows with `columns`: all where there are no more."""
    share, groups = _share(snapshot, rows, len(columns)), snapshot.num_row_groups
    tasks = max(1, min(groups, spark.sparkContext.defaultParallelism))
    shipped = spark.sparkContext.broadcast((snapshot.to_json(), list(columns)))

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pinned, names = Snapshot.from_json(shipped.value[0]), shipped.value[1]
        with RowGroupDecoder(pinned, names) as decoder:
            for batch in batches:
                for first in batch.column(0).to_pylist():
                    for group in range(first, groups, tasks):
                        yield _packed(drawn(decoder.decode(group), group, share))

    try:
        return _unpacked(spark.range(0, tasks, 1, tasks).mapInArrow(task, _COLUMN).collect())
    finally:
        shipped.destroy()


def _share(snapshot: Snapshot, rows: int, columns: int) -> float:
    return min(rows, _CELLS // max(columns, 1)) / max(snapshot.rows, 1)


def _packed(rows: pa.Table) -> pa.RecordBatch:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return pa.RecordBatch.from_pydict({"sample": [sink.getvalue()]})


def _unpacked(found: Sequence[Any]) -> pa.Table:
    return pa.concat_tables([pa.ipc.open_stream(row.sample).read_all() for row in found])
