"""The plan alone: arithmetic of steps, shares and streams, by properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import InputError
from dl_on_spark.input_pipeline.plan import Cursor, SamplePlan

group_rows = st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 20, 100]), min_size=1, max_size=12).filter(
    lambda rows: sum(rows) >= 4
)
plans = st.builds(
    lambda rows, workers, batch, seed, window: SamplePlan.create(
        rows, num_workers=workers, global_batch_size=batch, seed=seed, window=window
    ),
    group_rows,
    st.integers(1, 4),
    st.integers(4, 40),
    st.none() | st.integers(0, 2**40),
    st.none() | st.integers(1, 4),
)


def global_rows(plan: SamplePlan, epoch: int) -> list[list[tuple[int, int]]]:
    """(row group, row) of each stream, in the stream's shuffled order."""
    found = []
    for stream in plan.streams(epoch):
        rows = []
        for window in stream.windows():
            flat = [(s.group, row) for s in window.segments for row in range(s.start, s.stop)]
            order = window.row_order(plan.seed, epoch)
            rows += flat if order is None else [flat[i] for i in order]
        found.append(rows)
    return found


@settings(max_examples=150, deadline=None)
@given(plans, st.integers(0, 3))
def test_each_row_is_in_exactly_one_stream_of_an_epoch(plan, epoch):
    seen = sorted(row for stream in global_rows(plan, epoch) for row in stream)
    assert seen == [(g, i) for g, rows in enumerate(plan.group_rows) for i in range(rows)]


@settings(max_examples=150, deadline=None)
@given(plans)
def test_streams_differ_by_one_row_at_most(plan):
    lengths = [stream.rows for stream in plan.streams(0)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@settings(max_examples=150, deadline=None)
@given(plans, st.integers(1, 8))
def test_steps_use_each_row_once_and_every_rank_has_a_row_in_each(plan, world_size):
    world_size = min(world_size, plan.canonical_shards)
    steps = range(plan.steps_per_epoch)
    assert sum(plan.step_rows(step) for step in steps) == plan.rows
    for step in steps:
        counts = [plan.rank_rows(step, rank, world_size) for rank in range(world_size)]
        assert min(counts) >= 1
        assert sum(counts) == plan.step_rows(step)
        assert plan.shares(step, world_size) == pytest.approx(np.array(counts) / plan.step_rows(step))
        assert plan.shares(step, world_size).sum() == pytest.approx(1)


@settings(max_examples=150, deadline=None)
@given(plans)
def test_only_the_last_step_differs_in_size_and_a_remainder_smaller_than_the_shards_is_folded(plan):
    sizes = [plan.step_rows(step) for step in range(plan.steps_per_epoch)]
    assert all(size == plan.global_batch_size for size in sizes[:-1])
    rest = plan.rows % plan.global_batch_size
    folded = 0 < rest < plan.canonical_shards and plan.rows >= plan.global_batch_size
    assert plan.steps_per_epoch == -(-plan.rows // plan.global_batch_size) - folded
    if folded:
        assert sizes[-1] == plan.global_batch_size + rest


@settings(max_examples=100, deadline=None)
@given(group_rows, st.integers(4, 40), st.integers(0, 99))
def test_plans_made_for_1_2_and_4_workers_are_the_same_plan(rows, batch, seed):
    made = [SamplePlan.create(rows, num_workers=n, global_batch_size=batch, seed=seed) for n in (1, 2, 4)]
    assert made[0] == made[1] == made[2]


@settings(max_examples=100, deadline=None)
@given(plans)
def test_a_plan_survives_json(plan):
    again = SamplePlan.from_json(plan.to_json())
    assert again == plan
    assert global_rows(again, 1) == global_rows(plan, 1)


@settings(max_examples=100, deadline=None)
@given(group_rows, st.integers(0, 99))
def test_empty_row_groups_change_nothing(rows, seed):
    kept = [i for i, n in enumerate(rows) if n]
    full = SamplePlan.create(rows, num_workers=2, global_batch_size=5, seed=seed)
    dense = SamplePlan.create([rows[i] for i in kept], num_workers=2, global_batch_size=5, seed=seed)
    renamed = [[(kept[group], row) for group, row in stream] for stream in global_rows(dense, 2)]
    assert global_rows(full, 2) == renamed


def test_epochs_and_seeds_differ_and_the_same_seed_repeats():
    def rows(seed: int, epoch: int):
        return global_rows(SamplePlan.create([50] * 10, num_workers=1, global_batch_size=32, seed=seed), epoch)

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1)
    assert rows(1, 0) != rows(2, 0)


def test_without_a_seed_one_stream_is_the_file_order():
    plan = SamplePlan.create([3, 0, 2], num_workers=1, global_batch_size=2, seed=None, canonical_shards=1)
    assert global_rows(plan, 5) == [[(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]]


def test_the_order_of_a_seed_never_changes_between_versions():
    # As first released: a run that resumes under another release must meet the same batches.
    plan = SamplePlan.create([4, 4, 4, 4], num_workers=1, global_batch_size=8, seed=7, canonical_shards=2, window=2)
    assert global_rows(plan, 0) == [
        [(1, 2), (3, 3), (1, 1), (3, 1), (3, 0), (1, 0), (3, 2), (1, 3)],
        [(0, 3), (0, 2), (2, 3), (2, 2), (0, 1), (2, 1), (0, 0), (2, 0)],
    ]


def test_a_row_group_is_cut_into_few_segments_and_windows_are_found_from_any_row():
    plan = SamplePlan.create([1000], num_workers=4, global_batch_size=100, seed=3)
    streams = plan.streams(0)
    assert [len(stream.segments) for stream in streams] == [1] * 8
    windows = (
        SamplePlan.create([5] * 40, num_workers=1, global_batch_size=8, seed=3, window=2).streams(0)[0].windows(11)
    )
    assert [(w.index, w.first_row) for w in windows] == [(1, 10), (2, 20)]


def test_the_default_window_holds_about_16000_rows_of_a_stream():
    many_small = SamplePlan.create([100] * 10_000, num_workers=1, global_batch_size=64, seed=1)
    few_large = SamplePlan.create([1_000_000] * 20, num_workers=1, global_batch_size=64, seed=1)
    assert many_small.window == 164
    assert few_large.window == 1


@pytest.mark.parametrize(("workers", "shards"), [(1, 8), (2, 8), (3, 9), (4, 8), (5, 10), (8, 8), (12, 12)])
def test_default_shards_are_the_least_multiple_of_the_workers_from_8_on(workers, shards):
    assert SamplePlan.create([1000], num_workers=workers, global_batch_size=64, seed=0).canonical_shards == shards


def test_another_worker_count_serves_uneven_runs_of_whole_streams():
    plan = SamplePlan.create([100], num_workers=4, global_batch_size=20, seed=0)
    assert [len(plan.rank_streams(rank, 3)) for rank in range(3)] == [2, 3, 3]
    with pytest.raises(InputError, match="9 workers cannot share 8 streams"):
        plan.rank_streams(0, 9)


def test_cursors_are_ordered_and_the_last_step_leads_to_the_next_epoch():
    plan = SamplePlan.create([10], num_workers=1, global_batch_size=5, seed=0, canonical_shards=1)
    assert plan.next_cursor(Cursor(0, 0)) == Cursor(0, 1)
    assert plan.next_cursor(Cursor(0, 1)) == Cursor(1, 0)
    assert plan.next_cursor(Cursor(0, 2)) == Cursor(1, 0)
    assert Cursor(0, 9) < Cursor(1, 0)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([0, 0], {}, "no rows"),
        ([], {}, "no rows"),
        ([2], {"num_workers": 3}, "3 workers need at least 3 rows; the table has 2"),
        (
            [90],
            {"num_workers": 3, "global_batch_size": 2},
            "global_batch_size=2 is smaller than num_workers=3",
        ),
        ([90], {"num_workers": 0}, "num_workers=0"),
        ([90], {"seed": -1}, "seed=-1"),
        ([90], {"canonical_shards": 11}, "canonical_shards=11 does not fit"),
        ([90], {"num_workers": 4, "canonical_shards": 2}, "canonical_shards=2 does not fit"),
        ([90], {"window": 0}, "window=0"),
    ],
)
def test_impossible_plans_are_refused_with_the_way_out(rows, options, message):
    with pytest.raises(InputError, match=message) as refused:
        SamplePlan.create(rows, **{"num_workers": 1, "global_batch_size": 10, "seed": 0, **options})
    assert refused.value.fix
