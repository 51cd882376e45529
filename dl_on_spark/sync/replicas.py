"""Replicas that stay apart: every rank trains its own, and one model is published for all of them.

Between an epoch's end, or a checkpoint, and the next step the model holds the published weights, which are
validated, saved and seen by callbacks; the rank's replica is kept aside. What a callback changes in these
weights, the replica follows.

Rows count as in local SGD: before an exchange, a replica's progress since the exchange before is multiplied by
``K n_k / n``, the rank's rows in it over the ranks' mean. So the mean of the K replicas moves by the mean over
rows, ``sum_k (n_k / n) progress_k``. With equal rows the factor is 1, and the update is that of the paper.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.sync.accumulation import check_rounds
from dl_on_spark.sync.base import AgreedStatistics, Arrays, FlatVariables, StepRows, SyncSession

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

logger = logging.getLogger(__name__)

Flat = npt.NDArray[Any]


class ReplicaSession(SyncSession):
    """Rounds of ``every`` steps, each ended by an exchange between two `tf.function` calls.

    An epoch's end and a checkpoint end a round too. Optimizer slots stay local to each rank; batch-norm
    statistics become the mean over all rows when the weights are published. ``every`` None: no exchange but there.
    """

    replicas_identical = False

    def __init__(self, every: int | None, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        if every is not None:
            check_rounds(model, every, type(self).__name__.removesuffix("Session"))
        self._every, self._comm, self._rows = every, comm, rows
        self._weights = FlatVariables(list(model.trainable_weights))
        self._statistics = AgreedStatistics(model, comm, rows)
        self._exchanged = 0  # steps done at the last exchange
        self._start = self._weights.read()  # the replica then
        self._aside: Flat | None = None  # the replica, while the model holds the published weights
        self._published = self._start
        self._distance = 0.0

    @abstractmethod
    def exchange(self, replica: Flat) -> Flat:
        """The replica after an exchange with other ranks; ``replica`` may be overwritten."""

    @abstractmethod
    def published(self, replica: Flat) -> Flat:
        """The published weights, the same bits on all ranks."""

    def set_published(self, weights: Flat) -> None:
        """The published weights are these, as the model's variables hold them."""
        self._published = weights

    def steps_until_exchange(self, step: int) -> int | None:
        return None if self._every is None else max(1, self._exchanged + self._every - step)

    def before_steps(self, step: int) -> None:
        if self._aside is not None:
            self._start, self._aside = self._following_callbacks(self._aside), None
            self._weights.write(self._start)

    def after_steps(self, step: int) -> None:
        if self._every is not None and step - self._exchanged >= self._every:
            self._end_round(step)

    def finish_epoch(self, step: int) -> None:
        if self._aside is not None:
            return  # no step since
        if step > self._exchanged:
            self._end_round(step)
        self._statistics.agree(step)
        replica = self._weights.read()
        weights = self.published(replica)
        square = np.array([np.square(replica - weights, dtype=np.float64).sum()])
        self._distance = math.sqrt(self._comm.allreduce(square, "mean")[0])
        self._weights.write(weights)
        self._aside = replica
        self.set_published(self._weights.read())

    def metrics(self) -> dict[str, float]:
        """``consensus_distance``: the replicas' distance from the published weights, root mean square over ranks.

        Kong et al. 2021, "Consensus Control for Decentralized Deep Learning". Taken when the weights are published.
        """
        return {"consensus_distance": self._distance}

    def set_step(self, step: int) -> None:
        self._exchanged = step
        self._statistics.set_step(step)

    def state(self) -> Arrays:
        assert self._aside is not None, "a checkpoint comes after finish_epoch"
        self._aside = self._following_callbacks(self._aside)
        return {"replica": self._aside, "world_size": np.array(self._comm.world_size)}

    def load_state(self, state: Arrays) -> None:
        """On another number of workers than then, all replicas begin at the published weights."""
        weights = self._weights.read()
        self._aside = weights.copy()
        if int(state["world_size"]) == self._comm.world_size:
            self._aside = state["replica"].astype(self._weights.dtype)
        else:
            logger.warning("the number of workers changed: rank %d begins at the published weights.", self._comm.rank)
        self.set_published(weights)

    def _end_round(self, step: int) -> None:
        replica = self._weights.read()
        weight = self._rows.weight(self._exchanged, step)
        if weight != 1:
            replica = self._start + self._weights.dtype.type(weight) * (replica - self._start)
        self._exchanged = step
        self._start = self.exchange(replica)
        self._weights.write(self._start)

    def _following_callbacks(self, replica: Flat) -> Flat:
        """The replica, moved as callbacks have moved the published weights since."""
        now = self._weights.read()
        if not np.array_equal(now, self._published):
            replica = replica + (now - self._published)
            self.set_published(now)
        return replica
