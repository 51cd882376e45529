"""The schedules, alone: no sockets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.collectives.algorithms import ALLREDUCE, BROADCAST, pairwise, ring, tree
from dl_on_spark.collectives.schedule import Fold, block_bounds
from tests.collectives.simulator import carry_out

WORLD_SIZES = range(1, 18)


def allreduce(name, arrays, combine=np.add):
    """Run an allreduce in memory; returns (values, elements sent per rank)."""
    world_size, n = len(arrays), len(arrays[0])
    schedules = [ALLREDUCE[name](rank, world_size, n) for rank in range(world_size)]
    values = [array.copy() for array in arrays]
    sent = carry_out([s.reduce for s in schedules], values, combine)
    owned = [value[slice(*s.owned)].copy() for value, s in zip(values, schedules, strict=True)]
    for value in values:
        value[:] = np.nan  # what is not owned must come from the gather phase
    for value, mine, schedule in zip(values, owned, schedules, strict=True):
        value[slice(*schedule.owned)] = mine
    more = carry_out([s.gather for s in schedules], values, combine)
    return values, [a + b for a, b in zip(sent, more, strict=True)]


@pytest.mark.parametrize("name", sorted(ALLREDUCE))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_world_size_and_size_gives_the_sum_with_the_same_bits_everywhere(name, world_size):
    random = np.random.default_rng(world_size)
    for n in (0, 1, world_size - 1, world_size, world_size + 1, 97):
        arrays = [random.normal(size=n) for _ in range(world_size)]
        values, _ = allreduce(name, arrays)
        np.testing.assert_allclose(values[0], np.sum(arrays, axis=0), rtol=1e-12, atol=1e-12)
        assert len({value.tobytes() for value in values}) == 1


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(ALLREDUCE)),
    world_size=st.integers(1, 17),
    n=st.integers(0, 80),
    data=st.data(),
)
def test_the_maximum_has_the_same_bits_everywhere_even_with_signed_zeros(name, world_size, n, data):
    seed = data.draw(st.integers(0, 1000))
    arrays = list(np.random.default_rng(seed).choice([-0.0, 0.0, -1.0, 1.0], size=(world_size, n)))
    values, _ = allreduce(name, arrays, np.maximum)
    np.testing.assert_array_equal(values[0], np.max(arrays, axis=0))
    assert len({value.tobytes() for value in values}) == 1


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_bandwidth_optimal_algorithms_send_two_n_times_p_minus_1_over_p(world_size):
    n = 16 * 5
    for name in ("ring", "rabenseifner"):
        _, sent = allreduce(name, [np.ones(n)] * world_size)
        assert sent == [2 * n * (world_size - 1) // world_size] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_recursive_doubling_takes_a_logarithm_of_steps(world_size):
    logarithm = world_size.bit_length() - 1
    folded = 0 if world_size == 1 << logarithm else 1
    for rank in range(world_size):
        schedule = ALLREDUCE["recursive_doubling"](rank, world_size, 10)
        assert len(schedule.reduce) + len(schedule.gather) <= logarithm + 2 * folded


@pytest.mark.parametrize("name", sorted(BROADCAST))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_broadcast_from_any_root_reaches_every_rank(name, world_size):
    for root in range(world_size):
        values = [np.full(3, rank) for rank in range(world_size)]
        steps = [BROADCAST[name](rank, world_size, 3, root) for rank in range(world_size)]
        assert sum(carry_out(steps, values, np.add)) == 3 * (world_size - 1)
        assert all((value == root).all() for value in values)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=17))
def test_a_ragged_allgather_brings_every_block_to_every_rank(sizes):
    bounds = [0, *np.cumsum(sizes).tolist()]
    whole = np.arange(bounds[-1])
    values = []
    for rank in range(len(sizes)):
        value = np.full(bounds[-1], -1)
        value[bounds[rank] : bounds[rank + 1]] = whole[bounds[rank] : bounds[rank + 1]]
        values.append(value)
    carry_out([ring.allgather(rank, bounds) for rank in range(len(sizes))], values, np.add)
    assert all((value == whole).all() for value in values)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter_leaves_each_rank_its_own_block(world_size):
    for n in (0, 1, world_size, 41):
        bounds = block_bounds(n, world_size)
        values = [np.arange(n, dtype=float) * (rank + 1) for rank in range(world_size)]
        total = np.sum(values, axis=0)
        carry_out([ring.reduce_scatter(rank, bounds) for rank in range(world_size)], values, np.add)
        for rank, value in enumerate(values):
            mine = slice(bounds[rank], bounds[rank + 1])
            np.testing.assert_array_equal(value[mine], total[mine])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_rank_leaves_a_barrier_before_every_rank_has_entered(world_size):
    heard = [{rank} for rank in range(world_size)]
    rounds = [tree.barrier(rank, world_size) for rank in range(world_size)]
    for number in range(len(rounds[0])):
        before = [set(known) for known in heard]
        for rank in range(world_size):
            heard[rank] |= before[rounds[rank][number].receive.peer]
    assert all(known == set(range(world_size)) for known in heard)
    carry_out(rounds, [np.empty(0)] * world_size, np.add)


@given(n=st.integers(0, 1000), parts=st.integers(1, 40))
def test_blocks_cover_everything_and_differ_by_at_most_one(n, parts):
    bounds = block_bounds(n, parts)
    sizes = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == n
    assert sizes.max() - sizes.min() <= 1


@given(world_size=st.integers(1, 100))
def test_places_of_the_fold_keep_the_order_of_the_ranks(world_size):
    ranks = [Fold(0, world_size).rank_at(place) for place in range(Fold(0, world_size).size)]
    assert ranks == sorted(set(ranks))
    assert [Fold(rank, world_size).place for rank in ranks] == list(range(len(ranks)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_alltoall_brings_every_block_to_its_rank(world_size):
    n = 3
    values = [np.full((2, world_size, n), -1) for _ in range(world_size)]
    for rank, both in enumerate(values):
        both[0] = 100 * rank + np.arange(world_size)[:, None]
        both[1, rank] = both[0, rank]
    flat = [both.reshape(-1) for both in values]
    sent = carry_out([pairwise.alltoall(rank, world_size, n) for rank in range(world_size)], flat, np.add)
    for rank, both in enumerate(values):
        np.testing.assert_array_equal(both[1], np.repeat(100 * np.arange(world_size)[:, None] + rank, n, axis=1))
    assert sent == [(world_size - 1) * n] * world_size
