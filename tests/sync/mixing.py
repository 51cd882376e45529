"""A topology of gossip as the matrix of its round."""

from __future__ import annotations

import numpy as np

from dl_on_spark.sync.gossip import TOPOLOGIES


def mixing(topology: str, world_size: int, turn: int) -> np.ndarray:
    """W, shape (world_size, world_size): rank k takes ``W[k, j]`` of rank j."""
    matrix = np.zeros((world_size, world_size))
    for offset, weight in TOPOLOGIES[topology](world_size, turn).items():
        for rank in range(world_size):
            matrix[rank, (rank - offset) % world_size] += weight
    return matrix
