"""How stale gradients were: counts in bins of powers of two, over the run and all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dl_on_spark.sync.base import Arrays

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

BINS = (0, 1, 2, 4, 8, 16, 32, 64)
"""A bin reaches from its number to below the next; the last is open. In steps."""


class StalenessCounts:
    """Gradients by staleness. A gradient is what one worker computes in one application, over all shards.

    Those that no one counted when ranks agree were synchronous: one a step and rank, staleness 0.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._all = np.zeros(len(BINS), np.int64)
        self._sum = self._greatest = 0
        self._step = 0
        self._own = np.zeros(len(BINS), np.int64)
        self._own_sum = self._own_greatest = 0

    def add(self, staleness: int) -> None:
        """Count a gradient of this rank; of its shards the stalest tells."""
        self._own[np.searchsorted(BINS, staleness, "right") - 1] += 1
        self._own_sum += staleness
        self._own_greatest = max(self._own_greatest, staleness)

    def agree(self, step: int) -> None:
        """Take in what all ranks counted; ``step`` steps are done."""
        if not self._own.any():
            self._own[0] = step - self._step
        every = self._comm.allgather(np.array([*self._own, self._own_sum, self._own_greatest], np.int64))
        self._all += every[:, : len(BINS)].sum(0)
        self._sum += int(every[:, -2].sum())
        self._greatest = max(self._greatest, int(every[:, -1].max()))
        self._step = step
        self._own[:] = 0
        self._own_sum = self._own_greatest = 0

    def set_step(self, step: int) -> None:
        """Go on after ``step`` steps."""
        self._step = step

    def metrics(self) -> dict[str, float]:
        """``staleness_4``: gradients whose staleness was from 4 to below 8; their sum is the number of gradients."""
        counts = {f"staleness_{least}": float(count) for least, count in zip(BINS, self._all, strict=True)}
        mean = self._sum / max(1, int(self._all.sum()))
        return {"staleness_mean": mean, "staleness_max": float(self._greatest), **counts}

    def state(self) -> Arrays:
        """What a checkpoint keeps: the same on all ranks."""
        return {"staleness": np.array([*self._all, self._sum, self._greatest], np.int64)}

    def load_state(self, state: Arrays) -> None:
        """Take what `state` gave."""
        saved = state["staleness"].astype(np.int64)
        self._all, self._sum, self._greatest = saved[: len(BINS)].copy(), int(saved[-2]), int(saved[-1])
