"""Elastic averaging: replicas are tied to a center by springs, and the center is published.

Synchronous EASGD (Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD"), in the order
step, then pull: after every so many steps, with the replicas x_k and the center c,

    x_k = x_k - alpha (x_k - c)
    c   = c + alpha sum_k (x_k - c)

both from the values before. What replicas give the center takes: ``c + sum_k x_k`` stays the same. The mean of
the replicas comes nearer to the center by the factor ``1 - alpha - beta``, where ``beta = K alpha``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dl_on_spark.errors import ConfigError
from dl_on_spark.sync.base import StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.replicas import Flat, ReplicaSession

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

BETA = 0.9
"""``alpha`` times the number of workers, where alpha is not given: the paper's value."""


@dataclass(frozen=True)
class ElasticAveraging(SyncStrategy):
    """Pull replicas and center together every ``every`` steps, and always at an epoch's end.

    ``alpha``: the part of its distance to the center that a replica goes, above 0 and at most 1 over the number of
    workers, so that the center is a mean of itself and the replicas; None is 0.9 over the number of workers.
    **The published model is the center**: it is validated, checkpointed and saved. Replicas differ and go on from
    where they were; the metric ``consensus_distance`` says how far they are from the center. Optimizer slots stay
    local to each rank; batch-norm statistics become the mean over all rows. Each exchange is one allreduce of the
    trainable weights.
    """

    alpha: float | None = None
    every: int = 4

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ConfigError(
                f"elastic_averaging: alpha={self.alpha}.", fix="Use a number above 0, at most 1 over the workers."
            )
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"elastic_averaging: every={self.every}.", fix="every counts steps from 1 on.")

    def __str__(self) -> str:
        alpha = "" if self.alpha is None else f"alpha={self.alpha},"
        return f"elastic_averaging:{alpha}every={self.every}"

    def check(self, world_size: int) -> None:
        if self.alpha is not None and self.alpha * world_size > 1 + 1e-9:
            raise ConfigError(
                f"elastic_averaging: alpha={self.alpha} with {world_size} workers throws the center beyond the "
                "replicas' mean.",
                fix=f"Use alpha={BETA / world_size:.2g}, or leave it out; it is at most 1 over the number of workers.",
            )

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        self.check(comm.world_size)
        return ElasticAveragingSession(self, model, comm, rows)


class ElasticAveragingSession(ReplicaSession):
    """Every rank holds the center: its update is a sum that has the same bits on all."""

    def __init__(self, config: ElasticAveraging, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        super().__init__(config.every, model, comm, rows)
        self._alpha = self._weights.dtype.type(BETA / comm.world_size if config.alpha is None else config.alpha)
        self._center = self._start.copy()

    def exchange(self, replica: Flat) -> Flat:
        pull = self._alpha * (replica - self._center)
        replica -= pull
        self._comm.allreduce(pull)
        self._center += pull
        return replica

    def published(self, replica: Flat) -> Flat:
        return self._center

    def set_published(self, weights: Flat) -> None:
        super().set_published(weights)
        self._center = weights.copy()
