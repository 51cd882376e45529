"""Where a run's time went, in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.report.time_split import PARTS, described, slowest, step_parts


def worker(**seconds: float) -> dict[str, float]:
    return {"steps": 100, **dict.fromkeys(PARTS, 0.0), "checkpoint": 0.0, **seconds}


@given(st.lists(st.lists(st.floats(0, 1e3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_parts_of_a_step_are_means_over_workers(seconds: list[list[float]]) -> None:
    ranks = [worker(**dict(zip(PARTS, one, strict=True))) for one in seconds]
    parts = step_parts(ranks)
    assert sum(parts.values()) == pytest.approx(sum(map(sum, seconds)) / len(seconds) / 100)


def test_workers_that_timed_no_step_are_left_out() -> None:
    idle = {**worker(), "steps": 0}
    assert step_parts([idle]) == {}
    assert described([idle]) == described([]) == "no step was timed"
    assert step_parts([idle, worker(compute=1.0)])["compute"] == pytest.approx(0.01)


def test_a_worker_is_slow_by_what_it_does_not_by_what_it_waits() -> None:
    ranks = [worker(compute=1.0, waiting=1.0), worker(compute=2.0), worker(compute=1.0, waiting=1.0)]
    assert slowest(ranks) == (1, pytest.approx(2.0))
    assert slowest([worker(compute=1.0), worker(compute=1.1)]) is None
    assert slowest([worker(compute=1.0)]) is None
    assert "Rank 1 takes 2.00 times as long" in described(ranks)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"compute": 1.0, "input": 0.5}, "Rows come too late"),
        ({"compute": 1.0, "exchange": 0.5}, "The exchange takes much"),
        ({"compute": 1.0, "waiting": 0.5}, "Workers wait for the slowest"),
    ],
)
def test_the_costliest_part_comes_with_advice_and_a_small_one_without(seconds: dict[str, float], said: str) -> None:
    assert said in described([worker(**seconds)] * 2)
    assert described([worker(compute=1.0, input=0.1)]) == (
        "input 9%, compute 91%, exchange 0%, waiting 0% of 11 ms a step."
    )
