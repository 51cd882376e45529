"""Ranks as threads of this process over real sockets."""

from __future__ import annotations

import socket
import threading

from dl_on_spark.collectives import Communicator
from tests.collectives.processes import SECRET


def as_threads(world_size, work, **options):
    """What ``work(comm)`` returns on each rank; an exception is returned in place of a result."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(world_size)]
    peers = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    results = [None] * world_size

    def run(rank):
        try:
            with Communicator.from_listener(
                listeners[rank], rank, peers, SECRET, **{"deadline_s": 20, **options}
            ) as comm:
                results[rank] = work(comm)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
