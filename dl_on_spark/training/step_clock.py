"""Where a worker's time goes: waiting for rows, computing, exchanging, waiting for other workers, saving.

Timed are the steps of an epoch with all that comes between them; start-up, the first execution (which traces the
model), checkpoints, validation and the ends of epochs are not. Checkpoints are counted apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import BlockFeed


@dataclass
class StepSeconds:
    """Seconds of ``steps`` timed steps of one worker since its start.

    ``input``: the loop waited for rows; ``exchange``: in collectives, while bytes moved or were reduced; ``waiting``:
    in collectives, while nothing moved because another worker or the network was behind; ``compute``: the rest.
    ``checkpoint``: of all checkpoints, not part of the steps.
    """

    steps: int = 0
    input: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    waiting: float = 0.0
    checkpoint: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


class StepClock:
    """Splits the time of a worker's executions by what feed and communicator have counted."""

    def __init__(self, feed: BlockFeed, comm: Communicator) -> None:
        self._feed, self._comm = feed, comm
        self.spent = StepSeconds()
        self._last: tuple[int, float] | None = None  # epoch and time of the execution before
        self._before = self._counters()
        self._began = self._before

    def begin(self) -> None:
        """An execution begins."""
        self._began = self._counters()

    def count(self, epoch: int, steps: int, seconds: float) -> float | None:
        """An execution of ``steps`` took ``seconds``: the seconds to be counted for it, None for the first."""
        now, counters = time.monotonic(), self._counters()
        last, self._last = self._last, (epoch, now)
        before, self._before = self._before, counters
        if last is None:
            return None
        if last[0] == epoch:  # with what Keras and its callbacks did in between
            seconds = max(seconds, now - last[1])
        else:
            before = self._began
        waited, called, idle = (b - a for a, b in zip(before, counters, strict=True))
        self.spent.steps += steps
        self.spent.input += waited
        self.spent.waiting += idle
        self.spent.exchange += called - idle
        self.spent.compute += max(0.0, seconds - waited - called)
        return seconds

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Time in here is a checkpoint's."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self.spent.checkpoint += now - began
        if self._last is not None:
            self._last, self._before = (self._last[0], now), self._counters()

    def _counters(self) -> tuple[float, float, float]:
        return self._feed.seconds_waiting, self._comm.seconds_in_calls, self._comm.seconds_waiting
