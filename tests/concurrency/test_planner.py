"""The planner's closed forms against their limits, the simulation, and published runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.concurrency import (
    WAYS,
    Cluster,
    Link,
    Shape,
    Workload,
    batches,
    estimate,
    plan,
    simulate,
    simulate_failures,
)
from dl_on_spark.concurrency.stragglers import expected_maximum, wait, with_failures

FREE = Link(0.0, 0.0)
LOAD = Workload(
    rows=1_000_000,
    epochs=2,
    batch=4096,
    step_s=0.0,
    row_s=1e-5,
    shape=Shape(
        weight_bytes=4_000_000,
        activation_bytes=4_000,
        boundary_bytes=400,
        exchanged_bytes=2_000,
        largest_layer=0.05,
    ),
)
CLUSTER = Cluster(workers_per_host=1, cores=1, threads=1, inside=FREE, between=FREE)
SLOW = replace(CLUSTER, between=Link.of(latency_us=50, gigabits=1))


@given(st.sampled_from(list(WAYS)), st.integers(0, 5))
def test_one_worker_is_the_measured_step(way: str, shift: int) -> None:
    load = replace(LOAD, batch=LOAD.batch << shift, step_s=1e-3, spread=0.1, exchange_s=1e-3)
    assert estimate(way, load, SLOW, 1).step_s == pytest.approx(load.compute_s(load.batch))


@given(st.integers(0, 10))
def test_without_any_cost_all_ways_but_the_pipeline_scale_ideally(doublings: int) -> None:
    workers = 1 << doublings
    for way in WAYS:
        if way != "pipeline":
            assert estimate(way, LOAD, CLUSTER, workers).efficiency == pytest.approx(1.0)
    if workers > 1:
        assert estimate("pipeline", LOAD, CLUSTER, workers).efficiency < 1


@given(
    st.sampled_from(list(WAYS)),
    st.integers(0, 10),
    st.floats(0, 1e-3),
    st.floats(0.1, 400),
    st.floats(0, 0.3),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_no_way_beats_one_worker_times_p(
    way: str, doublings: int, latency: float, gigabits: float, spread: float, per_host: int, threads: int
) -> None:
    link = Link.of(latency_us=latency * 1e6, gigabits=gigabits)
    cluster = Cluster(per_host, 4, threads, link, link)
    found = estimate(way, replace(LOAD, spread=spread, step_s=1e-4), cluster, 1 << doublings)
    assert 0 < found.efficiency <= 1 + 1e-9
    assert found.step_s == pytest.approx(found.step.compute + found.step.exchange + found.step.waiting)


def test_the_exchange_is_the_fixture_of_the_theory() -> None:
    """ResNet-50's gradient over 8 workers at 10 Gb/s and 50 us: a ring of 143.819 ms."""
    cluster = replace(CLUSTER, between=Link.of(latency_us=50, gigabits=10))
    load = replace(LOAD, shape=Shape(weight_bytes=102_228_128))
    assert estimate("allreduce", load, cluster, 8).step.exchange * 1e3 == pytest.approx(143.819, abs=5e-4)
    local = estimate("local SGD, every 16", load, cluster, 8).step.exchange
    assert local == pytest.approx(143.819e-3 / 16, rel=1e-5)
    assert estimate("allreduce, fp16", load, cluster, 8).step.bytes == pytest.approx(102_228_128 * 7 / 8)


def test_shared_cores_are_known() -> None:
    """Four workers on a host of two cores take twice as long as two."""
    host = Cluster(workers_per_host=4, cores=2, threads=1, inside=FREE, between=FREE)
    two, four = (estimate("allreduce", LOAD, host, count) for count in (2, 4))
    assert four.rows_per_second == pytest.approx(two.rows_per_second)
    assert four.efficiency == pytest.approx(0.5)


def test_the_expected_maximum_is_the_simulated_one() -> None:
    draws = np.random.default_rng(3).standard_normal((20_000, 64))
    for workers in (2, 5, 64):
        assert expected_maximum(workers) == pytest.approx(draws[:, :workers].max(1).mean(), rel=0.02)
    assert expected_maximum(1) == 0
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-4)


@pytest.mark.parametrize("workers", [1, 2, 16, 1024])
@pytest.mark.parametrize("every", [1, 16])
def test_the_simulation_agrees_with_the_wait_of_a_barrier(workers: int, every: int) -> None:
    found = simulate(workers=workers, steps=640, step_s=0.1, spread=0.1, exchange_s=0.02, every=every, seed=5)
    closed = 640 * (0.1 + wait(0.1, 0.1, workers, every) + 0.02 / every)
    assert found.seconds == pytest.approx(closed, rel=0.03)


def test_without_spread_the_simulation_is_exact_and_nobody_waits() -> None:
    for options in ({}, {"neighbours": 1}, {"staleness": 3}):
        found = simulate(workers=64, steps=100, step_s=0.1, exchange_s=0.01, **options)
        assert found.seconds == pytest.approx(100 * 0.11)
        assert found.waiting_s == pytest.approx(0, abs=1e-9)


def test_looser_synchronization_waits_less() -> None:
    """Barrier, ring of neighbours, staleness without bound: each waits less than the one before."""
    common = {"workers": 256, "steps": 400, "step_s": 0.1, "spread": 0.3, "seed": 1}
    barrier, ring = simulate(**common), simulate(**common, neighbours=1)
    loose, bounded = simulate(**common, staleness=400), simulate(**common, staleness=4)
    assert barrier.waiting_s > ring.waiting_s > loose.waiting_s
    assert barrier.waiting_s > bounded.waiting_s > loose.waiting_s
    strict = simulate(**common, staleness=0)
    assert strict.seconds == pytest.approx(barrier.seconds)


def test_failures_cost_what_the_closed_form_says() -> None:
    """Mean of 200 simulated runs; first order, so rates at which a tenth of the time is lost."""
    options = {"workers": 128, "failures_per_hour": 0.02, "interval_s": 120.0, "restart_s": 60.0}
    closed = with_failures(20_000, **options)
    runs = [simulate_failures(seconds=20_000, **options, seed=seed) for seed in range(200)]
    assert np.mean([run.seconds for run in runs]) == pytest.approx(closed, rel=0.02)
    assert with_failures(1000, 1024, 1000.0, 60, 60) == math.inf
    assert simulate_failures(seconds=500, **{**options, "failures_per_hour": 0.0}).seconds == 500


def test_a_plan_names_the_wall() -> None:
    found = plan(LOAD, SLOW, workers=[1, 2, 4, 8, 16])
    assert found.chosen.sync is not None
    assert found.chosen.sync in found.reason.replace("local SGD, every 16", "local_sgd:every=16")
    assert "the exchange" in found.reason or "were not asked for" in found.reason
    assert [e.workers for e in found.of("allreduce")] == [1, 2, 4, 8, 16]


def test_a_model_too_large_to_reduce_is_told_that_data_parallelism_is_wrong() -> None:
    """A gigabyte of weights, few rows and small layers' outputs, on a slow network."""
    shape = replace(LOAD.shape, weight_bytes=10**9, exchanged_bytes=10_000)
    load = replace(LOAD, batch=64, rows=64_000, row_s=2e-3, shape=shape)
    found = plan(load, SLOW, workers=[1, 2, 4, 8, 16])
    assert "wrong tool" in found.reason
    assert "wrong tool" not in plan(LOAD, CLUSTER).reason


def test_a_larger_batch_needs_more_epochs_by_the_noise_scale() -> None:
    load = replace(LOAD, noise_scale=4096.0, epochs=10)
    same, double = batches(load, [4096, 8192])
    assert (same.epochs, double.epochs) == (10, 15)
    assert plan(load, CLUSTER, [1]).data_cost == pytest.approx(2.0)
    assert plan(LOAD, CLUSTER, [1]).data_cost is None


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan(LOAD, CLUSTER, [0])
    with pytest.raises(ValueError, match="'ring' is unknown"):
        plan(LOAD, CLUSTER, [1], ["ring"])
    with pytest.raises(ValueError, match="too small for 8"):
        plan(replace(LOAD, batch=4), CLUSTER, [8])
