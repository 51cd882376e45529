"""The server of one shard: a thread that applies workers' gradients as they come and hands weights out.

It runs for a round, from the first step after the replicas agreed until every worker's last gradient before
they agree again. Requests: a learning rate (8 bytes) and a gradient of the shard. Answers: the gradient's staleness
in steps (8 bytes) and the shard's weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.collectives.requests import Requests
from dl_on_spark.sync.clocks import Clocks

Flat = npt.NDArray[Any]
PREFIX = 8
"""Bytes before the numbers of a shard."""


class ShardServer:
    """One round of serving. ``apply(gradient, rate)`` gives the shard's weights after an update."""

    def __init__(
        self,
        requests: Requests,
        clocks: Clocks,
        apply: Callable[[Flat, float, int], Flat],
        dtype: np.dtype[Any],
    ) -> None:
        self._requests, self._clocks, self._apply, self._dtype = requests, clocks, apply, dtype
        self._answers = requests.answers
        self._staleness: dict[int, int] = {}
        self._count: int | None = None  # gradients of each worker in this round, once that is known
        self._stopped = False
        self.failure: BaseException | None = None
        self._absent: int | None = None
        self._late: int | None = None
        self._thread = threading.Thread(target=self._run, name="shard-server", daemon=True)
        self._thread.start()

    def suspect(self, waiting: list[int]) -> int:
        """Whom a worker waits for whose answers from ``waiting`` do not come: the slowest, or one that is silent.

        An owner answers at once but for the bound, and every owner sees the same clocks.
        """
        if self._clocks.holds_back:
            return self._clocks.slowest()
        return waiting[0]

    def finish(self, count: int) -> None:
        """Return when ``count`` gradients of every worker were applied in this round.

        Raises CollectiveError naming a worker that left, DeadlineExceeded naming the slowest when no gradient
        comes for the deadline.
        """
        self._count = count
        self._answers.wake()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        if self._absent is not None:
            self._requests.lost(self._absent)
        if self._late is not None:
            self._requests.stalled(self._late)

    def stop(self) -> None:
        """End the thread, whatever is left to do."""
        self._stopped = True
        self._answers.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            self._answers.hang_up()  # all who wait for this shard hear of it, this rank's own worker too

    def _serve(self) -> None:
        last = time.monotonic()
        while not self._stopped:
            count = self._count
            if count is not None:
                if self._clocks.all_at(count) and not self._answers.unsent:
                    return
                self._absent = next((p for p in self._answers.gone if self._clocks.clock(p) < count), None)
                if self._absent is not None:
                    return
                if time.monotonic() - last > self._requests.patience_s:
                    self._late = self._answers.unsent[0] if self._clocks.all_at(count) else self._clocks.slowest()
                    return
            wait_s = None if count is None else max(0.0, last + self._requests.patience_s - time.monotonic())
            for worker, request in self._answers.wait(wait_s):
                self._take(worker, request)
                last = time.monotonic()

    def _take(self, worker: int, request: memoryview) -> None:
        rate = float(np.frombuffer(request[:PREFIX], np.float64)[0])
        gradient = np.frombuffer(request[PREFIX:], self._dtype)
        staleness = self._staleness[worker] = self._clocks.push(worker)
        weights = self._apply(gradient, rate, staleness)
        for one in self._clocks.release():
            answer = np.int64(self._staleness[one]).tobytes() + weights.tobytes()
            self._answers.answer(one, answer)
