"""What the network between ranks takes for messages of several sizes, and the alpha-beta link that fits."""

from __future__ import annotations

import statistics
import time

import numpy as np

from dl_on_spark.collectives.communicator import Communicator

SIZES = tuple(4 << 10 << (2 * doubling) for doubling in range(7))  # 4 KiB to 16 MiB
_SECONDS = 0.1  # a size; all of them together stay below a second
_MOST, _LEAST = 200, 5


def measure_exchanges(comm: Communicator, sizes: tuple[int, ...] = SIZES) -> list[tuple[int, float, str]]:
    """``(bytes, seconds, what carried it)``: the median allreduce of float32 arrays, of the slowest rank.

    Every rank calls it.

    How often a size is repeated follows from rank 0's first try, so that all ranks repeat it equally often.
    """
    found = []
    for size in sizes:
        values = np.zeros(size // 4, np.float32)
        began = time.perf_counter()
        comm.allreduce(values)
        count = np.array([min(_MOST, max(_LEAST, int(_SECONDS / (time.perf_counter() - began + 1e-9))))], np.int64)
        comm.broadcast(count, root=0)
        seconds = []
        for _ in range(int(count[0])):
            began = time.perf_counter()
            comm.allreduce(values)
            seconds.append(time.perf_counter() - began)
        slowest = np.array([statistics.median(seconds)], np.float64)
        comm.allreduce(slowest, op="max")
        found.append((size, float(slowest[0]), comm.allreduce_way(size)))
    return found
