"""Who may go on: the clocks of stale-synchronous parallel (Ho et al. 2013), as one shard's owner keeps them.

A worker's clock counts its gradients that were applied. One whose clock is c may take its next step when the
slowest clock is at least ``c - bound``. The owner of every shard holds the rule for the weights it hands out.
"""

from __future__ import annotations


class Clocks:
    """``workers`` clocks, all 0; ``bound``: steps that none may be ahead of the slowest, None for any number."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self._bound = bound
        self._clocks = [0] * workers
        self._updates = 0
        self._seen = [0] * workers  # updates in the weights that a worker has
        self._waiting: list[int] = []

    def push(self, worker: int) -> int:
        """A gradient of ``worker`` is applied and it waits for weights; returns the gradient's staleness.

        It counts in steps: updates since the worker's weights were handed out, over the number of workers, rounded
        down. So the gradients of a synchronous step, applied one after the other, have 0, and the greatest
        is twice the bound.
        """
        staleness = (self._updates - self._seen[worker]) // len(self._clocks)
        self._updates += 1
        self._clocks[worker] += 1
        self._waiting.append(worker)
        return staleness

    def release(self) -> list[int]:
        """Those who waited and may go on, with the weights as they are now, in the order they came."""
        least = min(self._clocks)
        free = [w for w in self._waiting if self._bound is None or self._clocks[w] - self._bound <= least]
        self._waiting = [w for w in self._waiting if w not in free]
        for worker in free:
            self._seen[worker] = self._updates
        return free

    @property
    def holds_back(self) -> bool:
        """Whether somebody waits for the slowest."""
        return bool(self._waiting)

    def slowest(self) -> int:
        """The first of the workers with the least clock."""
        return self._clocks.index(min(self._clocks))

    def clock(self, worker: int) -> int:
        """Gradients of ``worker`` that were applied."""
        return self._clocks[worker]

    def all_at(self, count: int) -> bool:
        """Whether ``count`` gradients of every worker were applied."""
        return min(self._clocks) >= count
