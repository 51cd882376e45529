"""Costs of communication: known values, lower bounds, limits, and the counts of our own algorithms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.collectives import shared
from dl_on_spark.collectives.algorithms import ALLREDUCE
from dl_on_spark.concurrency import communication as cost
from dl_on_spark.concurrency.communication import Cost, Link

RESNET50 = 25_557_032 * 4
SLOW = Link.of(latency_us=50, gigabits=10)
links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e-12, 1e-6))


@pytest.mark.parametrize(
    ("world", "name", "milliseconds"),
    [
        (8, "linear", 572.828),
        (8, "tree", 490.995),
        (8, "recursive_doubling", 245.498),
        (8, "ring", 143.819),
        (8, "rabenseifner", 143.419),
        (64, "ring", 167.309),
        (64, "rabenseifner", 161.609),
        (64, "recursive_doubling", 490.995),
    ],
)
def test_resnet50_over_10_gigabits(world: int, name: str, milliseconds: float) -> None:
    assert cost.ALLREDUCE[name](RESNET50, world, SLOW).seconds * 1e3 == pytest.approx(milliseconds, abs=6e-4)


def test_bounds_and_parameter_servers_of_resnet50() -> None:
    assert cost.allreduce_bound(RESNET50, 8, SLOW) * 1e3 == pytest.approx(143.269, abs=6e-4)
    assert cost.allreduce_bound(RESNET50, 8, SLOW, redundant=True) * 1e3 == pytest.approx(71.710, abs=6e-4)
    assert cost.parameter_server(RESNET50, 8, SLOW).seconds * 1e3 == pytest.approx(1308.62, abs=6e-3)
    assert cost.parameter_server(RESNET50, 8, SLOW, shards=8).seconds * 1e3 == pytest.approx(163.67, abs=6e-3)


def test_the_order_flips_for_small_messages() -> None:
    microseconds = {name: of(4096, 8, SLOW).seconds * 1e6 for name, of in cost.ALLREDUCE.items()}
    assert microseconds["recursive_doubling"] == pytest.approx(159.830, abs=6e-4)
    assert microseconds["rabenseifner"] == pytest.approx(305.734, abs=6e-4)
    assert microseconds["tree"] == pytest.approx(319.661, abs=6e-4)
    assert microseconds["ring"] == pytest.approx(705.734, abs=6e-4)
    assert cost.best_allreduce(4096, 8, SLOW)[0] == "recursive_doubling"
    assert cost.best_allreduce(RESNET50, 8, SLOW)[0] == "rabenseifner"


@given(st.floats(0, 1e10), st.integers(1, 1024), links)
def test_no_algorithm_beats_the_bound(size: float, world: int, link: Link) -> None:
    bound = cost.allreduce_bound(size, world, link)
    for name in ("tree", "ring", "rabenseifner"):
        assert cost.ALLREDUCE[name](size, world, link).seconds >= bound * (1 - 1e-12)
    # The butterfly repeats additions: only the bound that allows it holds.
    redundant = cost.allreduce_bound(size, world, link, redundant=True)
    assert cost.butterfly(size, world, link).seconds >= redundant * (1 - 1e-12)


@given(st.floats(0, 1e9), links)
def test_one_worker_pays_nothing(size: float, link: Link) -> None:
    assert all(of(size, 1, link) == Cost(0, 0, 0) for of in cost.ALLREDUCE.values())


@given(st.floats(1, 1e9), st.integers(1, 6), st.integers(0, 4), links)
def test_hierarchical_in_its_limits(size: float, lg_hosts: int, lg_inside: int, link: Link) -> None:
    hosts, inside = 2**lg_hosts, 2**lg_inside
    free = Link(0, 0)
    assert cost.hierarchical(size, hosts, 1, free, link) == cost.best_allreduce(size, hosts, link)[1]
    found = cost.hierarchical(size, 1, inside, link, link).seconds
    assert found == pytest.approx(cost.rabenseifner(size, inside, link).seconds)


@given(st.lists(st.floats(0, 1e8), min_size=1, max_size=9), st.floats(0, 1), links)
def test_hidden_and_exposed_communication_add_up(buckets: list[float], backward: float, link: Link) -> None:
    def exchange(size: float) -> float:
        return cost.ring(size, 4, link).seconds

    whole = sum(map(exchange, buckets))
    found = cost.exposed(buckets, backward, exchange)
    assert exchange(buckets[-1]) * (1 - 1e-9) - 1e-9 <= found <= whole + 1e-9
    assert cost.exposed(buckets, 0.0, exchange) == pytest.approx(whole)


def test_sparse_gossip_local_steps_and_the_bubble() -> None:
    assert cost.sparse_allreduce(1000, 8, SLOW).bytes == 7 * 1000 * 8
    assert cost.gossip(RESNET50, 2, SLOW).seconds == pytest.approx(2 * (50e-6 + RESNET50 * 0.8e-9))
    assert cost.every(16, Cost(32, 16, 160)) == Cost(2, 1, 10)
    assert cost.pipeline_bubble(1, 4) == 0 and cost.pipeline_bubble(4, 12) == pytest.approx(0.2)
    assert Link(1e-6, 1e-9, overhead_s=2e-6).alpha == pytest.approx(5e-6)


@pytest.mark.parametrize("name", ["ring", "rabenseifner", "recursive_doubling", "linear"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_messages_and_bytes_are_those_of_our_algorithms(name: str, world: int) -> None:
    size = 64 * world
    schedules = [ALLREDUCE[name](rank, world, size) for rank in range(world)]
    sends = [[step.send for step in (*s.reduce, *s.gather) if step.send is not None] for s in schedules]
    expected = cost.ALLREDUCE[name](size, world, SLOW)
    assert max(len(of_rank) for of_rank in sends) == expected.messages
    assert max(sum(span.stop - span.start for span in of_rank) for of_rank in sends) == expected.bytes


def test_shared_memory_changes_its_way_where_the_collectives_do() -> None:
    assert 2 * shared.DIRECT_BYTES == cost.AT_ONCE_BYTES
