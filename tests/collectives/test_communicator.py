"""Collectives among real processes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dl_on_spark.collectives import Communicator
from dl_on_spark.collectives.algorithms import ALLREDUCE
from dl_on_spark.errors import CollectiveError, DeadlineExceeded
from tests.collectives.processes import Ranks
from tests.collectives.threads import as_threads

DTYPES = ("float16", "float32", "float64", "int32", "int64")
SIZES = (0, 1, 5, 1000, 300_001)


def _values(rank, dtype, n):
    return (np.random.default_rng(rank).normal(size=n) * 10).astype(dtype)


def _everything(comm, pipe):
    """Every collective once in many shapes; returns allreduce results by case."""
    results = {}
    for name in ALLREDUCE:
        comm.algorithm = name
        for n in SIZES:
            for op in ("sum", "mean", "max"):
                results[name, "float32", n, op] = comm.allreduce(_values(comm.rank, "float32", n), op)
    comm.algorithm = "auto"
    for dtype in DTYPES:
        for op in ("sum", "max"):
            results["auto", dtype, 1000, op] = comm.allreduce(_values(comm.rank, dtype, 1000), op)
    root = comm.world_size - 1
    assert comm.broadcast(np.full((3, 2), comm.rank), root=root).tolist() == [[root] * 2] * 3
    gathered = comm.allgather(np.array([[comm.rank, 7]]))
    assert gathered.tolist() == [[[rank, 7]] for rank in range(comm.world_size)]
    ragged = comm.allgather_bytes(b"x" * comm.rank * 1000)
    assert [len(part) for part in ragged] == [rank * 1000 for rank in range(comm.world_size)]
    crossed = comm.alltoall(np.array([[10 * comm.rank + to] * 3 for to in range(comm.world_size)], np.int16))
    assert crossed.tolist() == [[10 * rank + comm.rank] * 3 for rank in range(comm.world_size)]
    for by in (1, 2, -1):
        before = comm.shift(np.full((2, SIZES[-1]), comm.rank), by)
        assert (before == (comm.rank - by) % comm.world_size).all()
        assert before.shape == (2, SIZES[-1])
    assert comm.shift(np.empty(0), 1).size == 0
    block = comm.reduce_scatter(np.arange(10.0), "mean")
    np.testing.assert_array_equal(block, np.array_split(np.arange(10.0), comm.world_size)[comm.rank])
    comm.barrier()
    if comm.world_size > 1:
        around = np.array([-1])
        if comm.rank == 0:
            comm.send(np.array([41]), 1)
            comm.recv(around, comm.world_size - 1)
        else:
            comm.recv(around, comm.rank - 1)
            comm.send(around + 1, (comm.rank + 1) % comm.world_size)
        assert around[0] == 41 + (comm.rank or comm.world_size) - 1
    return results


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_collective_is_right_and_bit_identical_on_all_ranks(world_size, tmp_path, backend):
    with Ranks(world_size, _everything, rendezvous=f"file://{tmp_path}/meet here", backend=backend) as ranks:
        results = ranks.results()
    for (name, dtype, n, op), first in results[0].items():
        inputs = [_values(rank, dtype, n).astype(np.float64) for rank in range(world_size)]
        expected = {"sum": np.sum, "mean": np.mean, "max": np.max}[op](inputs, axis=0)
        tolerance = {"float16": 2e-2, "float32": 1e-4}.get(dtype, 1e-9)
        np.testing.assert_allclose(first, expected, rtol=tolerance, atol=tolerance)
        for other in results[1:]:
            assert other[name, dtype, n, op].tobytes() == first.tobytes()
    assert not list(tmp_path.rglob("collectives-*"))


def _count(comm, pipe):
    before = comm.bytes_sent, comm.bytes_received
    comm.allreduce(np.ones(1_000_000, np.float32))
    return comm.bytes_sent - before[0], comm.bytes_received - before[1]


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_bytes_are_counted_as_the_ring_s_formula_says(backend):
    with Ranks(2, _count, backend=backend) as ranks:
        assert ranks.results() == [(4_000_000, 4_000_000)] * 2


def test_half_types_are_summed_in_float32():
    # 2048 + 1 is not a float16: summed in float16 the ones would be lost.
    def work(comm):
        return comm.allreduce(np.array([2048.0 if comm.rank == 0 else 1.0], np.float16))

    values = as_threads(3, work)
    assert [float(v[0]) for v in values] == [2050.0] * 3


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_ranks_that_call_different_collectives_all_raise_an_error_that_names_both(backend):
    def work(comm):
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.allreduce(np.ones(100, np.float32))

    for error in as_threads(2, work, backend=backend):
        assert type(error) is CollectiveError
        assert "barrier" in str(error)
        assert "float32[100]" in str(error)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize("sizes", [(100, 101, 100), (100_000, 100_000, 90_000)])
def test_ranks_that_call_with_different_sizes_all_raise(sizes, backend):
    errors = as_threads(3, lambda comm: comm.allreduce(np.ones(sizes[comm.rank], np.float32)), backend=backend)
    assert all(type(error) is CollectiveError for error in errors), errors
    assert all(str(sizes[0]) in str(error) for error in errors)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_after_a_failure_every_call_raises_the_first_error(backend):
    def work(comm):
        try:
            comm.allreduce(np.ones(10 + comm.rank))
        except CollectiveError as first:
            with pytest.raises(CollectiveError) as second:
                comm.barrier()
            return str(second.value) == str(first)

    assert as_threads(2, work, backend=backend) == [True, True]


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_rank_that_leaves_wakes_those_that_wait_for_it_with_its_reason(backend):
    def work(comm):
        if comm.rank == 1:
            raise ValueError("the table ended early")
        comm.barrier()

    errors = as_threads(3, work, backend=backend)
    for rank in (0, 2):
        assert isinstance(errors[rank], CollectiveError)
        assert "rank 1 failed: ValueError: the table ended early" in str(errors[rank])


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_closing_from_another_thread_wakes_a_waiting_call(backend):
    waiting = threading.Event()

    def work(comm):
        if comm.rank == 1:
            waiting.wait(20)
            return "left"
        threading.Timer(0.1, lambda: (comm.close(), waiting.set())).start()
        with pytest.raises(CollectiveError, match="closed"):
            comm.barrier()
        return "woken"

    assert as_threads(2, work, backend=backend) == ["woken", "left"]


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_a_call_that_nobody_joins_ends_at_the_deadline_and_names_the_silent_rank(backend):
    done = threading.Barrier(3)

    def work(comm):
        try:
            if comm.rank != 1:
                comm.barrier()
        finally:
            done.wait(20)

    errors = as_threads(3, work, deadline_s=1, backend=backend)
    assert errors[1] is None
    for rank in (0, 2):
        assert isinstance(errors[rank], DeadlineExceeded)
        assert f"rank {rank} of 3, barrier() #1: rank 1 did not answer within 1 s" in str(errors[rank])


def test_messages_larger_than_every_buffer_pass_both_ways_at_once():
    def work(comm):
        comm.algorithm = "recursive_doubling"
        return comm.allreduce(np.full(3_000_000, comm.rank + 1.0))

    first, second = as_threads(2, work)
    assert (first == 3).all()
    assert (second == 3).all()


def test_calls_may_come_from_several_threads_in_turn():
    def work(comm):
        values = np.ones(4)
        for _ in range(3):
            thread = threading.Thread(target=comm.allreduce, args=(values,))
            thread.start()
            thread.join(20)
        return values.tolist()

    assert as_threads(2, work) == [[8.0] * 4] * 2


def test_what_cannot_be_reduced_is_refused_and_the_communicator_stays_whole():
    def work(comm):
        for array, op in (
            (np.ones((4, 4)).T[:2], "sum"),
            (np.ones(3, np.complex64), "sum"),
            (np.ones(3, np.int32), "mean"),
            (np.ones(3), "median"),
        ):
            with pytest.raises(CollectiveError):
                comm.allreduce(array, op)
        with pytest.raises(CollectiveError, match="no rank 9"):
            comm.send(np.ones(1), 9)
        with pytest.raises(CollectiveError, match="limit is 3 bytes"):
            comm.allgather_bytes(b"four", limit=3)
        return comm.allreduce(np.ones(())).item()

    assert as_threads(2, work) == [2.0, 2.0]


def test_unusable_arguments_say_the_way_out():
    with pytest.raises(CollectiveError, match="Use one of: auto, linear"):
        Communicator.connect(0, 1, "file:///x", algorithm="fast")
    with pytest.raises(CollectiveError, match="Ranks are 0"):
        Communicator.connect(2, 2, "file:///x", b"s")
    with pytest.raises(CollectiveError, match="token_bytes"):
        Communicator.connect(0, 2, "file:///x")
    with pytest.raises(CollectiveError, match="tcp://host:port"):
        Communicator.connect(0, 2, "http://x", b"s")
    with pytest.raises(CollectiveError, match="backend 'mpi'"):
        Communicator.connect(0, 1, "file:///x", backend="mpi")
