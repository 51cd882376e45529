"""The split of a worker's time: what is timed, and that its parts add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dl_on_spark.training import step_clock
from dl_on_spark.training.step_clock import StepClock


@dataclass
class Counters:
    """What feed and communicator count, moved by the test."""

    seconds_waiting: float = 0.0
    seconds_in_calls: float = 0.0


class World:
    """A clock of the test's own, and both counters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.feed, self.comm = Counters(), Counters()
        monkeypatch.setattr(step_clock.time, "monotonic", lambda: self.now)
        feed: Any = self.feed
        comm: Any = self.comm
        self.clock = StepClock(feed, comm)

    def execute(self, epoch: int, steps: int, *, input: float, exchange: float, waiting: float, compute: float) -> Any:
        self.clock.begin()
        self.feed.seconds_waiting += input
        self.comm.seconds_in_calls += exchange + waiting
        self.comm.seconds_waiting += waiting
        seconds = input + exchange + waiting + compute
        self.now += seconds
        return self.clock.count(epoch, steps, seconds)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_first_execution_traces_and_is_not_timed(world: World) -> None:
    assert world.execute(0, 8, input=1, exchange=1, waiting=1, compute=10) is None
    assert world.clock.spent.as_dict() == dict.fromkeys(world.clock.spent.as_dict(), 0)


def test_parts_add_up_to_the_timed_seconds_with_what_callbacks_took(world: World) -> None:
    world.execute(0, 8, input=0, exchange=0, waiting=0, compute=5)
    world.now += 0.5  # a callback
    timed = world.execute(0, 8, input=0.25, exchange=0.5, waiting=0.125, compute=1)
    spent = world.clock.spent
    assert timed == pytest.approx(2.375)
    assert (spent.steps, spent.input, spent.exchange, spent.waiting) == (8, 0.25, 0.5, 0.125)
    assert spent.input + spent.compute + spent.exchange + spent.waiting == pytest.approx(timed)


def test_the_end_of_an_epoch_is_not_part_of_the_next_ones_steps(world: World) -> None:
    world.execute(0, 8, input=0, exchange=0, waiting=0, compute=5)
    world.now += 20  # validation, metrics over ranks
    world.comm.seconds_in_calls += 7
    assert world.execute(1, 8, input=0, exchange=0.5, waiting=0, compute=1) == pytest.approx(1.5)
    assert world.clock.spent.exchange == pytest.approx(0.5)


def test_checkpoints_are_counted_apart(world: World) -> None:
    world.execute(0, 8, input=0, exchange=0, waiting=0, compute=5)
    with world.clock.saving():
        world.now += 3
        world.comm.seconds_in_calls += 2
    assert world.execute(0, 8, input=0, exchange=0, waiting=0, compute=1) == pytest.approx(1)
    assert world.clock.spent.checkpoint == 3
    assert world.clock.spent.exchange == 0
