"""Requests beside the collectives: anyone asks anyone at any time; deaths and silence are named."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from dl_on_spark.errors import CollectiveError
from tests.collectives.processes import Ranks
from tests.collectives.threads import as_threads

LARGE = 3_000_000  # more than the buffers of a connection hold


class Echo:
    """Answers each request with its bytes in reverse, on a thread of its own; ``gate``: only once it is set."""

    def __init__(self, requests: Any, gate: threading.Event | None = None) -> None:
        self._answers, self._gate, self._ended = requests.answers, gate, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            for peer, data in self._answers.wait(None):
                if self._gate is not None:
                    self._gate.wait(20)
                self._answers.answer(peer, bytes(data)[::-1])

    def stop(self) -> None:
        self._ended = True
        self._answers.wake()
        self._thread.join()


def ask(requests: Any, rank: int, world: int, nbytes: int, turn: int) -> list[np.ndarray]:
    """What each rank answers a request that is different for each rank and turn."""
    out = [np.full(nbytes, (rank * 16 + peer + turn) % 251, np.uint8) for peer in range(world)]
    for row in out:
        row[0] = turn
    into = [np.zeros(nbytes, np.uint8) for _ in range(world)]
    requests.ask([row.data for row in out], [row.data for row in into], lambda waiting: waiting[0])
    for row, back in zip(out, into, strict=True):
        np.testing.assert_array_equal(row[::-1], back)
    return into


@pytest.mark.parametrize(("world", "nbytes", "turns"), [(2, 16, 50), (3, 1000, 20), (4, LARGE, 2)])
def test_everyone_asks_everyone_at_its_own_pace_while_collectives_go_on(world: int, nbytes: int, turns: int) -> None:
    def work(comm: Any) -> Any:
        requests = comm.requests(nbytes, nbytes)
        echo = Echo(requests)
        for turn in range(turns * (comm.rank + 1)):  # some ask more often than others
            ask(requests, comm.rank, world, nbytes, turn)
        total = comm.allreduce(np.ones(3))
        sent, received = requests.bytes_sent, requests.bytes_received
        echo.stop()
        assert comm.bytes_sent >= sent
        requests.close()
        return total[0], sent, received

    results = as_threads(world, work)
    asked = [turns * (rank + 1) for rank in range(world)]
    for rank, (total, sent, received) in enumerate(results):
        assert total == world
        assert sent == received == nbytes * (asked[rank] * (world - 1) + sum(asked) - asked[rank])


def test_a_world_of_one_has_nobody_to_ask() -> None:
    (error,) = as_threads(1, lambda comm: comm.requests(8, 8))
    assert isinstance(error, CollectiveError)


def test_ranks_that_differ_in_sizes_hear_of_it() -> None:
    def work(comm: Any) -> None:
        size = 16 + comm.rank
        requests = comm.requests(size, size)
        echo = Echo(requests)
        try:
            ask(requests, comm.rank, 2, size, 0)
        finally:
            requests.answers.hang_up()
            echo.stop()
            requests.close()

    assert all(isinstance(result, CollectiveError) for result in as_threads(2, work, deadline_s=3))


def _ask_forever(comm: Any, pipe: Any, nbytes: int) -> None:
    requests = comm.requests(nbytes, nbytes)
    echo = Echo(requests)
    try:
        ask(requests, comm.rank, comm.world_size, nbytes, 0)
        pipe.send(("asking", None))
        turn = 0
        while True:
            turn += 1
            ask(requests, comm.rank, comm.world_size, nbytes, turn % 200)
    finally:
        echo.stop()
        requests.close()


@pytest.mark.faults
@pytest.mark.parametrize("nbytes", [16, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
def test_a_rank_that_dies_or_stops_is_named_by_all(nbytes: int, stopped: bool) -> None:
    with Ranks(3, _ask_forever, nbytes, deadline_s=3 if stopped else 100) as ranks:
        ranks.wait_ready()
        for rank in range(3):
            assert ranks.read(rank)[0] == "asking"
        began = time.monotonic()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP if stopped else signal.SIGKILL)
        for rank in (0, 2):
            kind, (error, text) = ranks.outcome(rank)  # within 40 s, not the deadline of 100 s
            assert (kind, error) == ("error", "DeadlineExceeded" if stopped else "CollectiveError"), text
            assert f"rank {rank} of 3, request" in text
            assert "rank 1 did not answer within 3 s" in text if stopped else "rank 1 " in text, text
        assert time.monotonic() - began < 40
