"""What each rank does in `test_ranks`: every codec for some steps, with bytes counted, and once from a checkpoint."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.collectives.codecs import Bucket, Compressor, parse_codec

SHAPES = ((200, 120), (120,), (3, 3, 16, 32), (1,), (600, 1))
STEPS = 4


def bucket_for(rank: int) -> Bucket:
    return Bucket(SHAPES, np.dtype(np.float32), rank=rank, seed=3)


def gradient(rank: int, step: int) -> np.ndarray:
    rng = np.random.default_rng((rank, step))
    size = bucket_for(rank).size
    return (rng.standard_normal(size) * rng.choice([0.01, 0.1, 1.0], size)).astype(np.float32)


def run(comm: Communicator, pipe: Connection, codecs: list[str]) -> dict[str, Any]:
    """By codec: sums of every step, the same steps resumed after the first half, residual, bytes sent a step."""
    found: dict[str, Any] = {}
    bucket = bucket_for(comm.rank)
    for text in codecs:
        codec = parse_codec(text)
        compressor, sums, sent, saved = Compressor(codec, bucket), [], [], {}
        for step in range(STEPS):
            if step == STEPS // 2:
                saved = {name: value.copy() for name, value in compressor.state().items()}
            before = comm.bytes_sent
            sums.append(compressor.reduce(gradient(comm.rank, step), comm))
            sent.append(comm.bytes_sent - before)
        again, resumed = Compressor(codec, bucket), []
        again.load_state(saved)
        for step in range(STEPS // 2, STEPS):
            resumed.append(again.reduce(gradient(comm.rank, step), comm))
        state = compressor.state()
        bad = gradient(comm.rank, STEPS)
        bad[4321] = np.inf if comm.rank == 1 else 1.0
        bad_sum = compressor.reduce(bad, comm)
        found[text] = {"sums": sums, "resumed": resumed, "state": state, "sent": sent}
        found[text] |= {"bad sum": bad_sum, "state after": compressor.state()}
        pipe.send(("done with", text))
    return found
