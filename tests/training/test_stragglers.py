"""The driver names the worker that holds the others up, epoch by epoch."""

from __future__ import annotations

from dl_on_spark.training.stragglers import Paces


def spent(steps: float, compute: float) -> dict[str, float]:
    return {"steps": steps, "input": 0.0, "compute": compute, "exchange": 9.0, "waiting": 9.0, "checkpoint": 9.0}


def test_a_worker_is_named_for_the_epoch_in_which_it_was_slow() -> None:
    paces = Paces(3)
    assert [paces.add(rank, 0, spent(100, 2.0)) for rank in (2, 0, 1)] == [None, None, None]
    for rank, seconds in ((0, 4.0), (1, 6.0)):
        assert paces.add(rank, 1, spent(200, seconds)) is None  # not all have told yet
    assert paces.add(2, 1, spent(200, 4.0)) == (1, 2.0)
    assert [paces.add(rank, 2, spent(300, 2.0 * rank + 8)) for rank in (0, 1, 2)][:2] == [None, None]


def test_neither_a_fifth_nor_an_epoch_of_moments_names_anybody() -> None:
    for seconds in (2.3, 0.02):
        paces = Paces(2)
        paces.add(0, 0, spent(100, 2.0 if seconds > 1 else 0.01))
        assert paces.add(1, 0, spent(100, seconds)) is None
