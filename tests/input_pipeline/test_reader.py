"""The reader on real Parquet files: what a rank gets, from where, and what it refuses."""

import threading
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import DLOnSparkError, SchemaError, TableError
from dl_on_spark.input_pipeline.batch_sources import batch_rows, describe_batch
from dl_on_spark.input_pipeline.plan import Cursor, SamplePlan
from dl_on_spark.input_pipeline.reader import RankReader
from dl_on_spark.lake import open_table
from dl_on_spark.lake.row_groups import RowGroupDecoder
from dl_on_spark.lake.schema import Schema

SCHEMA = Schema.from_dict(
    {
        "name": "rows",
        "fields": {
            "id": {"type": "bigint", "role": "feature"},
            "name": {"type": "string", "role": "feature"},
            "half": {"type": "double", "role": "label"},
        },
    }
)


def write_files(folder, files):
    """Each file a list of row group sizes; ids count up over all files."""
    at = 0
    for number, sizes in enumerate(files):
        parts = []
        for size in sizes:
            ids = np.arange(at, at + size)
            at += size
            parts.append(pa.table({"id": ids, "name": [f"n{i % 5}" for i in ids], "half": ids / 2}, schema=STORED))
        with pq.ParquetWriter(folder / f"part-{number}.parquet", STORED) as writer:
            for part in parts:
                writer.write_table(part, row_group_size=max(1, part.num_rows))
    return open_table(folder).snapshot()


STORED = pa.schema([("id", pa.int64()), ("name", pa.string()), ("half", pa.float64())])


def plan_of(snapshot, **options):
    return SamplePlan.create(snapshot.row_groups.rows, **{"num_workers": 1, "seed": 5, **options})


def ids_of(snapshot, plan, world_size, epoch=0, first_step=0, **options):
    """The ids of each global batch: the ranks' batches joined in rank order."""
    found = []
    for rank in range(world_size):
        with RankReader(snapshot, plan, SCHEMA, None, rank, world_size, threads=2, **options) as reader:
            batches = list(reader.batches(epoch, first_step))
        for step, (x, y, weights) in enumerate(batches, start=first_step):
            assert len(x["id"]) == plan.rank_rows(step, rank, world_size) >= 1
            assert x["name"].tolist() == [f"n{i % 5}" for i in x["id"]]
            np.testing.assert_array_equal(y, x["id"] / 2)
            assert weights is None
        found.append([x["id"].tolist() for x, _, _ in batches])
    assert len({len(batches) for batches in found}) == 1
    return [list(chain(*parts)) for parts in zip(*found, strict=True)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.sampled_from([0, 1, 1, 5, 30]), max_size=4), min_size=1, max_size=4),
    batch=st.integers(4, 20),
    window=st.integers(1, 3),
    seed=st.none() | st.integers(0, 9),
    data=st.data(),
)
def test_any_table_gives_each_row_once_and_the_same_global_batches_to_1_2_3_and_4_workers(
    tmp_path_factory, files, batch, window, seed, data
):
    if sum(map(sum, files)) < 4:
        files = [*files, [9]]
    snapshot = write_files(tmp_path_factory.mktemp("table"), files)
    plan = plan_of(snapshot, global_batch_size=batch, window=window, seed=seed)
    alone = ids_of(snapshot, plan, 1)
    assert sorted(chain(*alone)) == list(range(snapshot.rows))
    for world_size in (2, 3, 4):
        if world_size <= plan.canonical_shards:
            assert ids_of(snapshot, plan, world_size) == alone
    step = data.draw(st.integers(0, plan.steps_per_epoch))
    assert ids_of(snapshot, plan, 1, first_step=step) == alone[step:]


@pytest.mark.parametrize("seed", [None, 5])
def test_the_rows_that_a_batch_is_said_to_have_are_those_it_gets(tmp_path, seed):
    snapshot = write_files(tmp_path, [[30, 20], [5], [45]])
    plan = plan_of(snapshot, global_batch_size=16, num_workers=2, seed=seed)
    starts = np.cumsum([0, 30, 20, 5])
    for epoch in (0, 1):
        batches = ids_of(snapshot, plan, 2, epoch)
        for step, ids in enumerate(batches):
            told = [batch_rows(plan, Cursor(epoch, step), rank, 2) for rank in (0, 1)]
            found = [starts[group] + rows for one in told for group, rows in one.items()]
            assert sorted(np.concatenate(found)) == sorted(ids)
    text = describe_batch(plan, snapshot, Cursor(0, 2), 1, 2)
    assert text.startswith("8 rows (part-") and ".parquet, row group 0: " in text


def test_files_of_100_7_and_1_rows_feed_3_workers(tmp_path):
    snapshot = write_files(tmp_path, [[100], [7], [1]])
    plan = plan_of(snapshot, num_workers=3, global_batch_size=16)
    batches = ids_of(snapshot, plan, 3)
    assert len(batches) == plan.steps_per_epoch
    assert sorted(chain(*batches)) == list(range(108))


def test_empty_files_and_row_groups_train_as_if_they_were_not_there(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    with_empty = write_files(tmp_path / "with", [[20], [0], [3, 0, 9], []])
    without = write_files(tmp_path / "without", [[20], [3, 9]])
    plans = [plan_of(s, num_workers=2, global_batch_size=8) for s in (with_empty, without)]
    assert ids_of(with_empty, plans[0], 2) == ids_of(without, plans[1], 2)


def test_one_row_group_is_split_among_4_workers_and_decoded_once_by_each(tmp_path, monkeypatch):
    decoded = []
    decode = RowGroupDecoder.decode
    monkeypatch.setattr(RowGroupDecoder, "decode", lambda self, i: decoded.append(i) or decode(self, i))
    snapshot = write_files(tmp_path, [[1000]])
    batches = ids_of(snapshot, plan_of(snapshot, num_workers=4, global_batch_size=100), 4)
    assert sorted(chain(*batches)) == list(range(1000))
    assert decoded == [0] * 4


@pytest.mark.parametrize(("world_size", "again"), [(1, 0), (2, 1), (4, 3)])
def test_row_groups_cut_between_streams_of_one_rank_are_decoded_once(tmp_path, monkeypatch, world_size, again):
    decoded = []
    decode = RowGroupDecoder.decode
    monkeypatch.setattr(RowGroupDecoder, "decode", lambda self, i: decoded.append(i) or decode(self, i))
    snapshot = write_files(tmp_path, [[1000] * 31])
    batches = ids_of(snapshot, plan_of(snapshot, num_workers=4, global_batch_size=100), world_size)
    assert sorted(chain(*batches)) == list(range(31_000))
    assert len(decoded) == 31 + again  # a boundary between two ranks alone costs a second decoding


def test_epochs_differ_and_the_same_epoch_repeats(tmp_path):
    snapshot = write_files(tmp_path, [[50] * 6])
    plan = plan_of(snapshot, global_batch_size=32)
    assert ids_of(snapshot, plan, 2, epoch=1) == ids_of(snapshot, plan, 1, epoch=1)
    assert ids_of(snapshot, plan, 1, epoch=1) != ids_of(snapshot, plan, 1, epoch=0)


def test_a_restart_late_in_an_epoch_decodes_only_what_is_left(tmp_path, monkeypatch):
    snapshot = write_files(tmp_path, [[10] * 80])
    plan = plan_of(snapshot, global_batch_size=40, window=1)
    whole = ids_of(snapshot, plan, 1)
    decoded = []
    decode = RowGroupDecoder.decode
    monkeypatch.setattr(RowGroupDecoder, "decode", lambda self, i: decoded.append(i) or decode(self, i))
    assert ids_of(snapshot, plan, 1, first_step=18) == whole[18:]
    assert len(decoded) <= 8 * 2


def test_paths_with_spaces_one_file_and_marker_files_work(tmp_path):
    folder = tmp_path / "my table"
    folder.mkdir()
    snapshot = write_files(folder, [[12], [5]])
    (folder / "_SUCCESS").touch()
    (folder / ".hidden.parquet").write_bytes(b"no")
    for uri in (str(folder) + "/", folder):
        again = open_table(uri).snapshot()
        assert again.rows == snapshot.rows == 17
        assert len(list(chain(*ids_of(again, plan_of(again, global_batch_size=8), 1)))) == 17
    one = open_table(folder / "part-0.parquet").snapshot()
    assert sorted(chain(*ids_of(one, plan_of(one, global_batch_size=8), 2))) == list(range(12))


def test_a_filtered_table_gives_only_its_rows(tmp_path):
    write_files(tmp_path, [[30, 30], [40]])
    snapshot = open_table(tmp_path).where("id >= 25 and id < 70").snapshot()
    plan = plan_of(snapshot, num_workers=2, global_batch_size=8)
    assert sorted(chain(*ids_of(snapshot, plan, 2))) == list(range(25, 70))


def test_an_error_in_a_decoding_thread_reaches_the_consumer_and_leaves_no_thread(tmp_path):
    snapshot = write_files(tmp_path, [[20] * 4])
    plan = plan_of(snapshot, global_batch_size=8)
    before = threading.active_count()
    with RankReader(snapshot, plan, SCHEMA, None, 0, 1, threads=2) as reader:
        (tmp_path / "part-0.parquet").unlink()
        with pytest.raises(TableError, match=r"part-0\.parquet"):
            list(reader.batches(0))
        assert isinstance(reader.failure, TableError)
    assert threading.active_count() == before


def test_an_iterator_left_in_mid_epoch_does_not_stop_the_next_one_or_the_close(tmp_path):
    snapshot = write_files(tmp_path, [[20] * 40])
    plan = plan_of(snapshot, global_batch_size=8)
    before = threading.active_count()
    reader = RankReader(snapshot, plan, SCHEMA, None, 0, 1, threads=2)
    left = reader.batches(0)
    next(left)
    assert len(list(reader.batches(0))) == plan.steps_per_epoch
    reader.close()
    reader.close()
    assert threading.active_count() == before
    with pytest.raises(DLOnSparkError, match="closed"):
        list(reader.batches(1))


def test_a_read_that_hangs_ends_at_the_deadline(tmp_path, monkeypatch):
    snapshot = write_files(tmp_path, [[20]])
    go = threading.Event()
    decode = RowGroupDecoder.decode
    monkeypatch.setattr(RowGroupDecoder, "decode", lambda self, i: go.wait(60) and decode(self, i))
    plan = plan_of(snapshot, global_batch_size=8)
    try:
        with (
            RankReader(snapshot, plan, SCHEMA, None, 0, 1, threads=1, deadline_s=0.1) as reader,
            pytest.raises(DLOnSparkError, match=r"not read within 0\.1 s"),
        ):
            list(reader.batches(0))
    finally:
        go.set()


def test_a_plan_of_another_snapshot_is_refused(tmp_path):
    snapshot = write_files(tmp_path, [[20]])
    with pytest.raises(TableError, match="another snapshot"):
        RankReader(snapshot, SamplePlan.create([21], num_workers=1, global_batch_size=8, seed=0), SCHEMA, None, 0, 1)


def test_a_missing_column_is_refused_before_reading(tmp_path):
    pq.write_table(pa.table({"id": [1, 2, 3]}), tmp_path / "a.parquet")
    snapshot = open_table(tmp_path).snapshot()
    with pytest.raises(SchemaError, match="name"):
        RankReader(snapshot, plan_of(snapshot, global_batch_size=2), SCHEMA, None, 0, 1)


def test_a_refused_null_names_the_file_it_is_in_not_the_first_of_its_window(tmp_path):
    write_files(tmp_path, [[6], [6], [6]])
    third = pq.read_table(tmp_path / "part-2.parquet")
    pq.write_table(third.set_column(0, "id", pa.array([None, *range(5)], pa.int64())), tmp_path / "part-2.parquet")
    snapshot = open_table(tmp_path).snapshot()
    plan = plan_of(snapshot, global_batch_size=6, window=3, seed=None)
    with (
        RankReader(snapshot, plan, SCHEMA, None, 0, 1, threads=2) as reader,
        pytest.raises(SchemaError, match=r"Column 'id' of part-2\.parquet, row group 0 has 1 nulls or NaN among"),
    ):
        list(reader.batches(0))


def test_text_in_folders_names_and_in_columns_that_files_call_otherwise_is_fed(tmp_path):
    for day in ("a", "b"):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"old": ["x", "y"], "id": [1, 2]}), tmp_path / f"day={day}" / "part-0.parquet")
    snapshot = open_table(tmp_path).snapshot()
    # As Delta's column mapping and Iceberg's field ids tell it: renamed, and not yet there in the second file.
    names = [{"new": "old"}, {"new": ""}]
    files = tuple(replace(file, stored_as=own) for file, own in zip(snapshot.files, names, strict=True))
    columns = pa.schema([("new", pa.string()), ("id", pa.int64()), ("day", pa.string())])
    snapshot = replace(snapshot, files=files, table_schema=columns)
    fields = {name: {"type": "string", "role": "feature", "nulls": {"fill": "none"}} for name in ("new", "day")}
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=4, seed=None)
    with RankReader(snapshot, plan, Schema.from_dict({"name": "t", "fields": fields}), None, 0, 1) as reader:
        rows = [(new, day) for batch in reader.columns(0) for new, day in zip(batch["new"], batch["day"], strict=True)]
    assert sorted(rows) == [("none", "b"), ("none", "b"), ("x", "a"), ("y", "a")]
