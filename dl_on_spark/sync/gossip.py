"""Gossip: every rank averages with its neighbours only, and no step waits for all ranks.

Decentralized SGD (Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?"), in the
order step, then mix: ``x_k = sum_j W_kj x_j`` with a doubly stochastic matrix W, so that the replicas' mean stays
the same and their distances from it shrink. A topology is circulant: it says how many places around the circle of
ranks a neighbour is away, and with which weight it counts.

- ``ring``: a third each for oneself and both neighbours, in every round; W is symmetric.
- ``exponential``: half for oneself, half for the rank ``2^t`` places before, with t going through
  ``0 ... ceil(log2 K) - 1`` round by round: the one-peer exponential graph (Assran et al. 2019; Ying et al. 2021).
  Where K is a power of two, log2 K such rounds make the exact mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dl_on_spark.errors import ConfigError
from dl_on_spark.sync.base import Arrays, StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.replicas import Flat, ReplicaSession

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Weights = dict[int, float]


def ring(world_size: int, turn: int) -> Weights:
    """Weights by places before oneself (0 is oneself), which sum to 1: of a ring, the same in every turn."""
    offsets = {0, 1 % world_size, -1 % world_size}
    return {offset: 1 / len(offsets) for offset in sorted(offsets)}


def exponential(world_size: int, turn: int) -> Weights:
    """Weights by places before oneself (0 is oneself), which sum to 1: of the exponential graph in turn ``turn``."""
    if world_size == 1:
        return {0: 1.0}
    return {0: 0.5, 2 ** (turn % (world_size - 1).bit_length()): 0.5}


TOPOLOGIES: dict[str, Callable[[int, int], Weights]] = {"ring": ring, "exponential": exponential}
"""(world size, turn) -> weights by places before oneself."""


@dataclass(frozen=True)
class Gossip(SyncStrategy):
    """Mix replicas along a graph every ``every`` steps, and always at an epoch's end.

    ``topology``: "ring" (two neighbours in each round) or "exponential" (one, ever further away).
    **The published model is the average of all replicas**: it is validated, checkpointed and saved. Replicas differ
    and go on from where they were; the metric ``consensus_distance`` says how far they are from the average.
    Optimizer slots stay local to each rank; batch-norm statistics become the mean over all rows at an epoch's end.
    A rank sends its trainable weights to each neighbour in an exchange, and takes part in one allreduce of them
    at an epoch's end or a checkpoint.
    """

    topology: str = "ring"
    every: int = 1

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ConfigError(f"gossip: topology {self.topology!r} is unknown.", fix=f"Known: {', '.join(TOPOLOGIES)}.")
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"gossip: every={self.every}.", fix="every counts steps from 1 on.")

    def __str__(self) -> str:
        every = "" if self.every == 1 else f",every={self.every}"
        return f"gossip:topology={self.topology}{every}"

    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        return GossipSession(self, model, comm, rows)


class GossipSession(ReplicaSession):
    """Sends to the rank that is as many places after oneself as the one it hears from is before."""

    def __init__(self, config: Gossip, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        super().__init__(config.every if comm.world_size > 1 else None, model, comm, rows)
        self._topology = TOPOLOGIES[config.topology]
        self._turn = 0

    def exchange(self, replica: Flat) -> Flat:
        kind = replica.dtype.type
        weights = self._topology(self._comm.world_size, self._turn)
        self._turn += 1
        mixed: Flat = replica * kind(weights.pop(0))
        for offset, weight in weights.items():
            mixed += kind(weight) * self._comm.shift(replica, offset)
        return mixed

    def published(self, replica: Flat) -> Flat:
        mean = replica.copy()
        self._comm.allreduce(mean, "mean")
        return mean

    def state(self) -> Arrays:
        return {**super().state(), "turn": np.array(self._turn)}

    def load_state(self, state: Arrays) -> None:
        super().load_state(state)
        self._turn = int(state["turn"])
