"""Which worker holds the others up: found on the driver, from the time that each worker's steps took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

_SLOW = 1.2  # as much longer than the others' median does the slowest worker compute
_WORTH_S = 1.0  # an epoch in which a worker was busy for less says nothing

Seconds = Mapping[str, float]


def slowest(seconds_by_rank: Sequence[Seconds]) -> tuple[int, float] | None:
    """The worker whose steps compute and read longest, and its time over the others' median; None below 1.2."""
    busy = [_busy(one) / one["steps"] if one.get("steps") else 0.0 for one in seconds_by_rank]
    if len(busy) < 2 or min(busy) <= 0:
        return None
    rank = max(range(len(busy)), key=busy.__getitem__)
    factor = busy[rank] / statistics.median(busy[:rank] + busy[rank + 1 :])
    return (rank, factor) if factor >= _SLOW else None


class Paces:
    """What the workers of one attempt have said of their time, as `step_clock.StepSeconds` since their start."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._told: dict[int, dict[int, Seconds]] = {}

    def add(self, rank: int, epoch: int, seconds: Seconds) -> tuple[int, float] | None:
        """An epoch ended on `rank`; once it has on all, the epoch's slowest worker as `slowest` gives it."""
        told = self._told.setdefault(epoch, {})
        told[rank] = seconds
        if len(told) < self._workers:
            return None
        before = self._told.pop(epoch - 1, {})
        spent = [
            {part: value - before.get(one, {}).get(part, 0) for part, value in told[one].items()}
            for one in range(self._workers)
        ]
        return slowest(spent) if max(map(_busy, spent)) >= _WORTH_S else None


def _busy(seconds: Seconds) -> float:
    return seconds["input"] + seconds["compute"]
