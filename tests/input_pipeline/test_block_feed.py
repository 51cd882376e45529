"""A block feed gives the reader's batches as tensors, from any cursor, and the reader's own errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import DLOnSparkError, TableError
from dl_on_spark.input_pipeline import BlockFeed, Cursor, RankReader, SamplePlan, open_table
from dl_on_spark.input_pipeline.block_feed import step_of
from dl_on_spark.lake.schema import Schema

FIELDS = {
    "id": {"type": "bigint", "role": "feature"},
    "flag": {"type": "boolean", "role": "feature"},
    "name": {"type": "string", "role": "feature"},
    "pair": {"type": "array<float>", "role": "feature", "shape": [2]},
    "late": {"type": "double", "role": "label"},
    "importance": {"type": "float", "role": "weight"},
}
SCHEMA = Schema.from_dict({"name": "t", "fields": FIELDS})
ROWS = 203


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[RankReader]:
    ids = np.arange(ROWS)
    columns = {
        "id": ids,
        "flag": ids % 3 == 0,
        "name": [f"n{i % 7}" for i in ids],
        "pair": pa.array(np.stack([ids, -ids], 1).tolist(), pa.list_(pa.float32())),
        "late": ids / 4,
        "importance": pa.array(ids + 1, pa.float32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=40)
    snapshot = open_table(tmp_path).snapshot()
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=20, seed=3)
    with RankReader(snapshot, plan, SCHEMA, None, 0, 1, threads=1) as reader:
        yield reader


@pytest.mark.parametrize("most", [1, 4, 100])
def test_steps_of_blocks_are_the_readers_batches(reader: RankReader, most: int) -> None:
    import tensorflow as tf

    with BlockFeed(reader.blocks, reader.preprocessor) as feed:
        number = tf.TensorSpec((), tf.int32)
        step = tf.function(step_of, input_signature=[feed.block_spec, number])
        for cursor in (Cursor(0, 0), Cursor(2, 7), Cursor(1, 9)):  # sought again before an epoch's end, too
            feed.seek(cursor)
            wanted = list(reader.batches(cursor.epoch, cursor.step))[:2]
            done = 0
            while done < len(wanted):
                block, first, count = feed.take(min(most, len(wanted) - done))
                for index in range(first, first + count):
                    (x, y, w), (want_x, want_y, want_w) = step(block, tf.constant(index)), wanted[done]
                    for name in ("id", "flag", "pair"):
                        np.testing.assert_array_equal(x[name], want_x[name])
                    assert [name.decode() for name in x["name"].numpy()] == want_x["name"].tolist()
                    np.testing.assert_array_equal(y, want_y)
                    np.testing.assert_array_equal(w, want_w)
                    done += 1


def test_specs_leave_steps_and_rows_open(reader: RankReader) -> None:
    with BlockFeed(reader.blocks, reader.preprocessor) as feed:
        x, _, weight = feed.element_spec
        assert x["pair"].shape.as_list() == [None, 2] and weight.dtype.name == "float32"
        assert feed.block_spec[0]["pair"].shape.as_list() == [None, None, 2]


def test_an_epochs_end_is_told_and_numbers_share_the_blocks_memory(reader: RankReader) -> None:
    blocks = list(reader.blocks(0))
    with BlockFeed(lambda epoch, step: iter(blocks), reader.preprocessor) as feed:
        feed.seek(Cursor(0, 0))
        taken = 0
        while taken < reader.plan.steps_per_epoch:
            block, _, count = feed.take(100)
            taken += count
        with pytest.raises(IndexError, match="no more steps"):
            feed.take(1)
        blocks[-1]["id"][0, 0] = -5
        assert int(block[0]["id"][0, 0]) == -5


def test_the_readers_own_error_is_raised(reader: RankReader, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").unlink()
    with BlockFeed(reader.blocks, reader.preprocessor) as feed:
        feed.seek(Cursor(0, 0))
        with pytest.raises(TableError, match=r"a\.parquet"):
            feed.take(1)


def test_a_block_that_does_not_come_is_an_error_at_the_deadline(reader: RankReader) -> None:
    hang = threading.Event()

    def blocks(epoch: int, step: int) -> Iterator[Any]:
        hang.wait(30)
        yield from reader.blocks(epoch, step)

    with BlockFeed(blocks, reader.preprocessor, deadline_s=0.2) as feed:
        feed.seek(Cursor(0, 0))
        with pytest.raises(DLOnSparkError, match=r"not ready within 0\.2 s"):
            feed.take(1)
        hang.set()
