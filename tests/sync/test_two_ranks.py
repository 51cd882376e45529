"""Strategies on two real processes: the same weights as one process, as the formulas, and on both ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.collectives.processes import Ranks
from tests.sync import ranks
from tests.training.worlds import PLAN

Found = list[dict[Any, Any]]
SAME_AS_ONE = ["heavy ball", "adam, clipped", "loss scale", "own step", "two steps a batch"]
AGREE = [*SAME_AS_ONE, "local", "nesterov", "batch norm", "batch norm, local"]


@pytest.fixture(scope="module")
def found() -> Found:
    with Ranks(2, ranks.run, deadline_s=60) as two:
        return two.results()


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 2e-5) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_moved(actual: list[np.ndarray], start: list[np.ndarray]) -> None:
    assert max(float(np.abs(one - other).max()) for one, other in zip(actual, start, strict=True)) > 1e-3


@pytest.mark.parametrize("name", SAME_AS_ONE)
def test_two_workers_at_a_global_batch_take_the_steps_of_one(found: Found, name: str) -> None:
    assert PLAN.step_rows(PLAN.steps_per_epoch - 1) == 11  # an uneven last batch is part of it
    assert_close(found[0][name], found[0]["alone", name])
    assert_moved(found[0][name], ranks.build().get_weights())


@pytest.mark.parametrize("name", AGREE)
def test_all_ranks_end_with_the_same_bits(found: Found, name: str) -> None:
    for one, other in zip(found[0][name], found[1][name], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", SAME_AS_ONE)
def test_the_optimizer_is_its_own_again_after_the_run(found: Found, name: str) -> None:
    assert not found[0][name, "wrapped"]


def test_a_model_that_trains_past_its_optimizer_is_refused(found: Found) -> None:
    for rank in found:
        kind, text = rank["past the optimizer"]
        assert kind == "ModelError"
        assert "past model.optimizer" in text


def test_frozen_weights_keep_every_bit(found: Found) -> None:
    for after in found[0]["frozen"]:
        for one, other in zip(after, ranks.build().get_weights()[:3], strict=True):
            np.testing.assert_array_equal(one, other)


def test_buckets_change_no_sum(found: Found) -> None:
    assert_close(found[0]["small buckets"], found[0]["allreduce"], 1e-6)


def test_averaging_after_every_plain_step_is_a_synchronous_step(found: Found) -> None:
    assert_close(found[0]["every step"], found[0]["alone", "allreduce"])


def test_an_outer_step_of_one_without_momentum_is_the_average(found: Found) -> None:
    assert_close(found[0]["outer that averages"], found[0]["local"])


def test_until_start_at_steps_are_synchronous(found: Found) -> None:
    assert_close(found[0]["synchronous at first"], found[0]["alone", "allreduce"])


@pytest.mark.parametrize(
    ("name", "second"),
    [("stepped", [4, 7]), ("quadratic", [7])],  # of 4 steps from the second epoch on; of (0.2 / 0.05)^2 then
)
def test_rounds_are_as_long_as_their_schedule_says(found: Found, name: str, second: list[int]) -> None:
    first = [2, 4, 6, 7] if name == "stepped" else [4, 7]  # (0.2 / 0.1)^2 = 4
    for rank in found:
        assert rank[name] == [*first, *(PLAN.steps_per_epoch + step for step in second)]


@pytest.mark.parametrize("name", list(ranks.OUTER))
def test_two_rounds_are_those_of_the_formula(found: Found, name: str) -> None:
    assert_close(found[0][name], found[0]["rounds", name])


@pytest.mark.parametrize("name", ["statistics", "statistics, local"])
def test_batch_norm_statistics_are_the_mean_over_all_rows(found: Found, name: str) -> None:
    rows = [sum(PLAN.rank_rows(s, rank, 2) for s in range(PLAN.steps_per_epoch)) for rank in range(2)]
    own = [one["own statistics"] for one in found]
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(*own, strict=True))
    mean = [(rows[0] * a + rows[1] * b) / PLAN.rows for a, b in zip(*own, strict=True)]
    assert_close(found[0][name], mean, 1e-5)
