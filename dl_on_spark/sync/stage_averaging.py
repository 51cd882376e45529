"""Averaging by stages: local SGD whose rounds are ordinary Spark stages, with no barrier and no worker that stays.

What a round computes is local SGD's (`local_sgd`); who carries it out differs. The driver runs one stage a round, whose
task k trains replica k from the last average, and stages that add up the replicas as a tree
(`dl_on_spark.training.stage_driver`). Any task may be killed, repeated, run twice or wait for a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dl_on_spark.errors import ConfigError
from dl_on_spark.sync.base import StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.local_sgd import LocalSGD, LocalSGDSession, Momentum, Nesterov

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator


@dataclass(frozen=True)
class StageAveraging(SyncStrategy):
    """Average models every ``every`` steps, and always at an epoch's end; None: there only.

    ``outer``: an outer optimizer on the averaged difference, as in `LocalSGD`. Optimizer slots stay with their
    replica. A round costs two stages and more: give it seconds of work.
    """

    every: int | None = None
    outer: Momentum | Nesterov | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.every, int) and not isinstance(self.every, bool) and self.every >= 1
        if self.every is not None and not whole:
            raise ConfigError(
                f"stage_averaging: every={self.every}.", fix="every counts steps from 1 on, or is left out: an epoch."
            )

    def __str__(self) -> str:
        options = [] if self.every is None else [f"every={self.every}"]
        options += [] if self.outer is None else [f"outer={self.outer}"]
        return ":".join(["stage_averaging", ",".join(options)] if options else ["stage_averaging"])

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        """The same rounds among workers that are there at once."""
        every = rows.plan.steps_per_epoch if self.every is None else self.every
        return LocalSGDSession(LocalSGD(every, self.outer), model, comm, rows)

    def round_end(self, step: int, steps_per_epoch: int) -> int:
        """Where the round ends that begins after ``step`` steps of an epoch."""
        return steps_per_epoch if self.every is None else min(step + self.every, steps_per_epoch)
