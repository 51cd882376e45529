"""Strangers at the door, wrong secrets, dead and stopped ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading

import numpy as np
import pytest

from dl_on_spark.collectives import Communicator, mesh
from dl_on_spark.collectives.authentication import Identity, Lane, Refused, accepting, connecting
from tests.collectives.processes import SECRET, Ranks

ME = Identity(0, 2, SECRET, "run-1")


def shake(connector, acceptor):
    """Carry messages between two handshakes in memory; returns what the acceptor ends with."""
    next(acceptor)
    outgoing, _ = next(connector)
    nonce, _ = acceptor.send(outgoing)
    proof, _ = connector.send(nonce)
    answer, _ = acceptor.send(proof)
    with contextlib.suppress(StopIteration):
        connector.send(answer)
    with pytest.raises(StopIteration) as done:
        acceptor.send(b"")
    return done.value.value


def test_two_that_know_the_secret_accept_each_other():
    assert shake(connecting(Identity(1, 2, SECRET, "run-1"), 0, Lane.DATA), accepting(ME)) == (1, Lane.DATA)


@pytest.mark.parametrize(
    "other",
    [
        Identity(1, 2, b"another secret", "run-1"),
        Identity(1, 2, SECRET, "run-2"),
        Identity(1, 3, SECRET, "run-1"),
        Identity(0, 2, SECRET, "run-1"),
        Identity(7, 2, SECRET, "run-1"),
    ],
    ids=["secret", "run", "world size", "own rank", "rank outside"],
)
def test_a_proof_for_another_secret_run_world_or_rank_is_refused(other):
    with pytest.raises(Refused):
        shake(connecting(other, 0, Lane.DATA), accepting(ME))


def test_a_recorded_handshake_cannot_be_replayed():
    connector = connecting(Identity(1, 2, SECRET, "run-1"), 0, Lane.DATA)
    first, second = accepting(ME), accepting(ME)
    next(first), next(second)
    hello, _ = next(connector)
    nonce, _ = first.send(hello)
    proof, _ = connector.send(nonce)
    second.send(hello)
    with pytest.raises(Refused):
        second.send(proof)


def test_an_acceptor_that_echoes_the_connector_s_proof_is_refused():
    connector = connecting(Identity(1, 2, SECRET, "run-1"), 0, Lane.DATA)
    next(connector)
    proof, _ = connector.send(b"n" * 32)
    with pytest.raises(Refused):
        connector.send(proof)


def test_strangers_and_half_open_connections_are_refused_logged_and_do_not_stop_the_run(caplog, monkeypatch):
    monkeypatch.setattr(mesh, "HANDSHAKE_S", 0.2)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    peers = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    address = listeners[0].getsockname()
    garbage, silent, slow = (socket.create_connection(address, timeout=10) for _ in range(3))
    garbage.sendall(os.urandom(4096))
    slow.sendall(b"DLSP")
    results = {}

    def run(rank):
        with Communicator.from_listener(listeners[rank], rank, peers, SECRET, deadline_s=20) as comm:
            results[rank] = comm.allreduce(np.ones(3)).tolist()

    with caplog.at_level(logging.WARNING):
        first = threading.Thread(target=run, args=(0,))
        first.start()
        for stranger in (garbage, silent, slow):
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):
                    pass
            stranger.close()
        second = threading.Thread(target=run, args=(1,))
        second.start()
        first.join(30), second.join(30)
    assert results == {0: [2.0] * 3, 1: [2.0] * 3}
    assert "no hello of this protocol" in caplog.text
    assert caplog.text.count("did not prove itself in time") == 2


def test_a_rank_with_the_wrong_secret_is_refused_with_the_reason():
    with Ranks(2, _reduce_forever, secrets=[SECRET, b"wrong"], deadline_s=4) as ranks:
        kind, (error, text) = ranks.outcome(1)
        assert (kind, error) == ("error", "CollectiveError")
        assert "was refused by rank 0" in text
        assert "same secret" in text
        kind, (error, text) = ranks.outcome(0)
        assert (kind, error) == ("error", "DeadlineExceeded")
        assert "connection of rank 1" in text
        assert "no proof of the secret" in text


def test_the_listener_is_closed_once_all_are_connected():
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    address = listeners[0].getsockname()
    peers = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    other = threading.Thread(
        target=lambda: Communicator.from_listener(listeners[1], 1, peers, SECRET, deadline_s=20).close()
    )
    other.start()
    comm = Communicator.from_listener(listeners[0], 0, peers, SECRET, deadline_s=20)
    with comm, pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    other.join(20)


def _reduce_forever(comm, pipe, n=200_000):
    values = np.zeros(n, np.float32)
    comm.allreduce(values)
    pipe.send(("reducing", None))
    while True:
        comm.allreduce(values)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.faults
@pytest.mark.parametrize("n", [10, 2_000_000], ids=["small", "large"])
def test_when_a_rank_is_killed_every_other_rank_raises_at_once_and_names_it(n, backend):
    with Ranks(4, _reduce_forever, n, deadline_s=100, backend=backend) as ranks:
        ranks.wait_ready()
        for rank in range(4):
            assert ranks.read(rank)[0] == "reducing"
        ranks.processes[2].kill()
        for rank in (0, 1, 3):
            kind, (error, text) = ranks.outcome(rank)  # within 40 s, not the deadline of 100 s
            assert (kind, error) == ("error", "CollectiveError"), text
            assert "rank 2 died" in text or "rank 2 was lost" in text
            assert f"rank {rank} of 4, allreduce(float32[{n}]" in text


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.faults
@pytest.mark.parametrize("n", [10, 2_000_000], ids=["small", "large"])
def test_when_a_rank_is_stopped_every_other_rank_raises_at_the_deadline_and_names_it(n, backend):
    with Ranks(4, _reduce_forever, n, deadline_s=3, backend=backend) as ranks:
        ranks.wait_ready()
        for rank in range(4):
            assert ranks.read(rank)[0] == "reducing"
        os.kill(ranks.processes[2].pid, signal.SIGSTOP)
        for rank in (0, 1, 3):
            kind, (error, text) = ranks.outcome(rank)
            assert (kind, error) == ("error", "DeadlineExceeded"), text
            assert "rank 2 did not answer within 3 s" in text
