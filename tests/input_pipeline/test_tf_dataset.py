"""tf.data batches are the reader's batches: same values, order, sizes and structure."""

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.input_pipeline import Cursor, RankReader, SamplePlan, open_table, to_tf_dataset
from dl_on_spark.lake.schema import Schema

FIELDS = {
    "id": {"type": "bigint", "role": "feature"},
    "name": {"type": "string", "role": "feature"},
    "pair": {"type": "array<float>", "role": "feature", "shape": [2]},
    "late": {"type": "double", "role": "label", "nulls": {"fill": 0}},
    "importance": {"type": "float", "role": "weight"},
}
SCHEMA = Schema.from_dict({"name": "t", "fields": FIELDS})


@pytest.fixture
def table(tmp_path):
    ids = np.arange(203)
    columns = {
        "id": ids,
        "name": [f"n{i % 7}" for i in ids],
        "pair": pa.array(np.stack([ids, -ids], 1).tolist(), pa.list_(pa.float32())),
        "late": ids / 4,
        "importance": pa.array(ids + 1, pa.float32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=40)
    return open_table(tmp_path)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_iterator_starts_at_the_cursor_and_gives_the_readers_batches(table, world_size):
    snapshot = table.snapshot()
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=20, seed=3)
    cursors = iter([Cursor(0, 0), Cursor(1, 4)])
    with RankReader(snapshot, plan, SCHEMA, None, 0, world_size, threads=1) as reader:
        dataset = to_tf_dataset(reader, lambda: next(cursors))
        x_spec, y_spec, weight_spec = dataset.element_spec
        assert [s.shape.as_list() for s in (x_spec["id"], x_spec["pair"], y_spec)] == [
            [None],
            [None, 2],
            [None],
        ]
        assert weight_spec.dtype.name == "float32"
        for epoch, step in ((0, 0), (1, 4)):
            wanted = list(reader.batches(epoch, step))
            got = list(dataset.as_numpy_iterator())
            assert len(got) == len(wanted) == plan.steps_per_epoch - step
            for (x, y, w), (want_x, want_y, want_w) in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(x["id"], want_x["id"])
                np.testing.assert_array_equal(x["pair"], want_x["pair"])
                assert [name.decode() for name in x["name"]] == want_x["name"].tolist()
                np.testing.assert_array_equal(y, want_y)
                np.testing.assert_array_equal(w, want_w)


def test_an_error_of_the_reader_is_kept_beside_tensorflows_text(table, tmp_path):
    import tensorflow as tf

    snapshot = table.snapshot()
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=20, seed=3)
    with RankReader(snapshot, plan, SCHEMA, None, 0, 1, threads=1) as reader:
        (tmp_path / "a.parquet").unlink()
        with pytest.raises(tf.errors.OpError, match=r"a\.parquet"):
            list(to_tf_dataset(reader, lambda: Cursor(0, 0)))
        assert "a.parquet" in str(reader.failure)


def test_a_table_gives_its_rows_in_file_order_or_shuffled_each_epoch(table):
    ids = [batch["id"].tolist() for batch in table.select(["id", "name"]).batches(50)]
    assert [len(batch) for batch in ids] == [50, 50, 50, 50, 3]
    assert list(chain(*ids)) == list(range(203))
    shuffled = np.concatenate([batch["id"] for batch in table.batches(50, SCHEMA, seed=1)])
    assert sorted(shuffled) == list(range(203)) != shuffled.tolist()
    dataset = table.where("id >= 100").to_tf_dataset(20, SCHEMA, seed=1)
    epochs = [np.concatenate([x["id"] for x, _, _ in dataset.as_numpy_iterator()]) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100, 203))
    assert epochs[0].tolist() != epochs[1].tolist()
