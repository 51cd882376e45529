"""Ranks of one host in shared memory, and several hosts with their leaders."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from dl_on_spark.collectives import host, shared
from dl_on_spark.collectives.reduction import OPERATIONS
from dl_on_spark.collectives.schedule import block_bounds
from dl_on_spark.collectives.shared import SharedMemory
from dl_on_spark.collectives.slot import Slot
from dl_on_spark.errors import CollectiveError
from tests.collectives.processes import Ranks
from tests.collectives.threads import as_threads


def _values(rank, dtype, n):
    return (np.random.default_rng([rank, n]).normal(size=n) * 100).astype(dtype)


def _fold(world_size, dtype, n, op):
    """The reduction in the order of ranks, which shared memory promises to the last bit."""
    total = functools.reduce(OPERATIONS[op], (_values(rank, dtype, n) for rank in range(world_size)))
    return total / np.asarray(world_size, dtype) if op == "mean" else total


CASES = [
    (dtype, op)
    for dtype in ("float32", "float64", "int32", "int64")
    for op in ("sum", "mean", "max")
    if op != "mean" or dtype.startswith("f")
]


@pytest.mark.parametrize("world_size", range(1, 18))
def test_every_world_reduces_in_the_order_of_ranks_to_the_last_bit(world_size, monkeypatch):
    monkeypatch.setattr(shared, "BUFFER_BYTES", 64 * 8 * world_size)  # many rounds, so that buffers are used again
    monkeypatch.setattr(shared, "DIRECT_BYTES", 512)
    monkeypatch.setattr(shared, "_CROWDED_SPIN_S", 0.0)
    monkeypatch.setattr(shared, "SPIN_S", 0.0)  # every wait sleeps and must be woken
    sizes = (0, 1, world_size - 1, world_size + 1, 1000, 4001)

    def work(comm):
        results = {}
        for number, n in enumerate(sizes):
            for dtype, op in (CASES[number], CASES[-1 - number]):
                results[dtype, n, op] = comm.allreduce(_values(comm.rank, dtype, n), op)
                results[dtype, n, op, "block"] = comm.reduce_scatter(_values(comm.rank, dtype, n), op)
            root = n % comm.world_size
            results[n, root] = comm.broadcast(_values(comm.rank, "int64", n), root)
            results[n] = comm.allgather(_values(comm.rank, "float32", n))
            comm.barrier()
        return results

    everywhere = as_threads(world_size, work, backend="shm")
    for rank, results in enumerate(everywhere):
        assert isinstance(results, dict), results
        for number, n in enumerate(sizes):
            for dtype, op in (CASES[number], CASES[-1 - number]):
                expected = _fold(world_size, dtype, n, op)
                np.testing.assert_array_equal(results[dtype, n, op], expected)
                bounds = block_bounds(n, world_size)
                block = expected[bounds[rank] : bounds[rank + 1]]
                np.testing.assert_array_equal(results[dtype, n, op, "block"], block)
            np.testing.assert_array_equal(results[n, n % world_size], _values(n % world_size, "int64", n))
            for peer in range(world_size):
                np.testing.assert_array_equal(results[n][peer], _values(peer, "float32", n))


def _of_thread(hosts):
    """A host identity by the rank that asks: ``hosts[rank]``."""
    return lambda: str(hosts[int(threading.current_thread().name.removeprefix("rank-"))])


@pytest.mark.parametrize("hosts", ["0011", "0101", "0001", "01202", "0110211"])
def test_hosts_reduce_through_their_leaders_with_the_same_bits_everywhere(hosts, monkeypatch):
    monkeypatch.setattr(host, "host_identity", _of_thread(hosts))

    def work(comm):
        results = {}
        for n, op in itertools.product((0, 3, 1000, 300_001), ("sum", "mean", "max")):
            results[n, op] = comm.allreduce(_values(comm.rank, "float32", n), op)
        results["half", "sum"] = comm.allreduce(np.full(3, 2048 if comm.rank == 0 else 1, np.float16))
        assert comm.allgather(np.array([comm.rank])).reshape(-1).tolist() == list(range(comm.world_size))
        assert comm.broadcast(np.array([comm.rank]), root=1).tolist() == [1]
        comm.barrier()
        return results

    first, *others = as_threads(len(hosts), work, backend="shm")
    assert isinstance(first, dict), first
    for (n, op), result in first.items():
        assert all(other[n, op].tobytes() == result.tobytes() for other in others)
        if n != "half":
            expected = _fold(len(hosts), "float64", n, op)
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def test_only_leaders_send_over_the_network(monkeypatch):
    monkeypatch.setattr(host, "host_identity", _of_thread("0011"))

    def work(comm):
        before = comm.bytes_sent
        comm.allreduce(np.ones(1_000_000, np.float32))
        return comm.bytes_sent - before

    # Within a host: half handed in, half a result; leaders: the ring's n between two, and n handed back.
    assert as_threads(4, work) == [12_000_000, 4_000_000] * 2


def test_counters_say_what_others_read_of_this_rank_and_it_of_others():
    def work(comm):
        counts = [(comm.bytes_sent, comm.header_bytes_sent)]
        for n in (1_000, 300_000):
            before = comm.bytes_sent, comm.bytes_received
            comm.allreduce(np.ones(n, np.float64))
            counts.append((comm.bytes_sent - before[0], comm.bytes_received - before[1]))
        return counts

    # Small: all to all. Large: two thirds handed in and one third of results; both are read by two.
    assert as_threads(3, work, backend="shm") == [[(0, 0), (8_000, 16_000), (2_400_000, 3_200_000)]] * 3


def test_a_message_to_a_rank_that_reduces_is_a_mismatch_that_names_both():
    def work(comm):
        if comm.rank == 0:
            comm.send(np.ones(7), 1)
            comm.recv(np.ones(7), 1)
        comm.allreduce(np.ones(5, np.float32))

    for error in as_threads(2, work, backend="shm"):
        assert type(error) is CollectiveError
        assert "message(float64[7])" in str(error)
        assert "allreduce(float32[5], sum)" in str(error)


def _no_memory(*_):
    raise OSError(28, "No space left on device")


def test_where_memory_cannot_be_reserved_ranks_take_tcp_and_say_so(monkeypatch, caplog):
    monkeypatch.setattr(os, "posix_fallocate", _no_memory)
    with caplog.at_level(logging.WARNING):
        assert as_threads(3, lambda comm: comm.allreduce(np.ones(2)).tolist()) == [[3.0, 3.0]] * 3
    assert caplog.text.count("exchange over TCP") == 1
    assert "No space left on device" in caplog.text
    for error in as_threads(2, lambda comm: None, backend="shm"):
        assert isinstance(error, CollectiveError)
        assert "cannot share memory" in str(error)
        assert "No space left on device" in str(error)


def test_a_rank_that_finds_another_nonce_makes_all_take_tcp(monkeypatch, caplog):
    attach = Slot.attach
    monkeypatch.setattr(Slot, "attach", lambda pid, fd, nonce: attach(pid, fd, bytes(len(nonce))))
    with caplog.at_level(logging.WARNING):
        assert as_threads(2, lambda comm: comm.allreduce(np.ones(2)).tolist()) == [[2.0, 2.0]] * 2
    assert "is the slot of another rank" in caplog.text


def test_ranks_that_are_each_alone_on_their_host_take_tcp_without_a_word(monkeypatch, caplog):
    monkeypatch.setattr(host, "host_identity", _of_thread("012"))
    with caplog.at_level(logging.INFO):
        assert as_threads(3, lambda comm: comm.allreduce(np.ones(2)).tolist()) == [[3.0, 3.0]] * 3
    assert not caplog.text
    for error in as_threads(3, lambda comm: None, backend="shm"):
        assert "no two ranks are on one host" in str(error)


def _mapped(comm, pipe):
    comm.allreduce(np.ones(100_000))
    during = Path("/proc/self/maps").read_text().count("memfd:dl_on_spark")
    comm.close()
    opened = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    return during, "memfd" in Path("/proc/self/maps").read_text(), any("memfd" in name for name in opened)


@pytest.mark.parametrize(("backend", "slots"), [("auto", 3), ("tcp", 0)])
def test_the_backend_can_be_chosen_and_nothing_stays_mapped_after_close(backend, slots):
    with Ranks(3, _mapped, backend=backend) as ranks:
        assert ranks.results() == [(slots, False, False)] * 3


def _named_segments():
    """What lies in the folder of named shared memory."""
    return sorted(Path("/dev/shm").iterdir())


_STAGES = {
    "create": (Slot, "create"),
    "attach": (Slot, "attach"),
    "open_bell": (host, "_open_bell"),
    "hand_in": (SharedMemory, "_hand_in"),
    "reduce": (SharedMemory, "_reduce"),
    "take": (SharedMemory, "_take"),
    "small": (SharedMemory, "_reduce_everything"),
}


def _die_at(stage, who, rank):
    if rank in who:
        owner, name = _STAGES[stage]
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def _large_then_small(comm, pipe):
    comm.allreduce(np.ones(1_000_000))
    comm.allreduce(np.ones(10))


@pytest.mark.faults
@pytest.mark.parametrize("stage", _STAGES)
def test_a_rank_killed_at_any_stage_is_named_at_once_and_leaves_nothing(stage):
    before = _named_segments()
    with Ranks(3, _large_then_small, before=functools.partial(_die_at, stage, {1}), deadline_s=100) as ranks:
        for rank in (0, 2):
            kind, (error, text) = ranks.outcome(rank)  # within 40 s, not the deadline of 100 s
            assert (kind, error) == ("error", "CollectiveError"), text
            assert "rank 1 died" in text or "rank 1 was lost" in text
    assert _named_segments() == before


@pytest.mark.faults
@pytest.mark.parametrize("stage", _STAGES)
def test_when_all_ranks_are_killed_nothing_of_theirs_is_left(stage):
    before = _named_segments()
    with Ranks(2, _large_then_small, before=functools.partial(_die_at, stage, {0, 1})) as ranks:
        for process in ranks.processes:
            process.join(40)
            assert process.exitcode is not None
    assert _named_segments() == before


def test_more_ranks_than_cores_reduce_a_large_array():
    with Ranks(8, _large) as ranks:
        assert ranks.results() == [36.0 * 2_000_003] * 8


def _large(comm, pipe):
    return float(comm.allreduce(np.full(2_000_003, comm.rank + 1.0)).sum())
