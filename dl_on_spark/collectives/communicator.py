"""The public door: collectives among the ranks of one run."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from dl_on_spark.collectives.algorithms import BROADCAST, pairwise, ring, tree
from dl_on_spark.collectives.authentication import Identity, Lane
from dl_on_spark.collectives.choice import (
    allreduce_algorithm,
    allreduce_schedule,
    broadcast_algorithm,
    check_algorithm,
)
from dl_on_spark.collectives.mesh import build_mesh
from dl_on_spark.collectives.reduction import (
    OPERATIONS,
    Array,
    accumulator,
    check_in_place,
    check_reducible,
    finish,
)
from dl_on_spark.collectives.rendezvous import meet
from dl_on_spark.collectives.schedule import Span, Step, Steps, block_bounds
from dl_on_spark.collectives.sink import Reduce, Replace, Sink, scratch_elements
from dl_on_spark.collectives.tcp import Backend, TcpBackend
from dl_on_spark.collectives.wire import Call
from dl_on_spark.errors import CollectiveError

_BACKENDS = ("auto", "tcp")


class Communicator:
    """Rank ``rank`` of ``world_size``: collectives that all ranks call in the same order.

    Any thread may call, one at a time. Results are bit-identical on all ranks. A wait in which
    nothing moves for ``deadline_s`` seconds raises DeadlineExceeded; a dead peer, a peer that calls
    another collective or another size raises CollectiveError, at once and on every rank. After a
    failure the communicator is broken: each further call raises the first error. A world of one
    needs no peers. Use it in ``with``: an exception inside is told to the other ranks as the cause.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: Backend | None,
        *,
        algorithm: str = "auto",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.algorithm = check_algorithm(algorithm)
        self._backend = backend
        self._lock = threading.Lock()
        self._closed = False
        self._sequence = 0
        self._messages: dict[tuple[int, int], int] = {}
        self._scratch: dict[str, Array] = {}

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        rendezvous: str,
        secret: bytes = b"",
        backend: str = "auto",
        algorithm: str = "auto",
        deadline_s: float = 60,
        *,
        host: str | None = None,
        run: str = "",
    ) -> Self:
        """Meet the other ranks in a shared folder (``file:///dir``) or at rank 0 (``tcp://host:port``).

        ``secret`` must be the same on all ranks and known to nobody else (``secrets.token_bytes(32)``).
        ``host`` is this rank's address as others reach it; it listens there only, and only until
        all are connected. ``run`` tells apart runs that share a secret.
        """
        _check_place(rank, world_size)
        if backend not in _BACKENDS:
            raise CollectiveError(f"there is no backend {backend!r}.", fix=f"Use: {', '.join(_BACKENDS)}.")
        check_algorithm(algorithm)
        if world_size == 1:
            return cls(rank, 1, None, algorithm=algorithm)
        lanes = meet(Identity(rank, world_size, _check_secret(secret), run), rendezvous, host, deadline_s)
        return cls(rank, world_size, TcpBackend(rank, world_size, lanes, deadline_s), algorithm=algorithm)

    @classmethod
    def from_listener(
        cls,
        listener: socket.socket,
        rank: int,
        peers: Sequence[str],
        secret: bytes,
        *,
        algorithm: str = "auto",
        deadline_s: float = 60,
        run: str = "",
    ) -> Self:
        """The ranks listen already and know each other: ``peers[r]`` is rank r's "host:port".

        The communicator takes the listener over and closes it once all ranks are connected.
        """
        _check_place(rank, len(peers))
        check_algorithm(algorithm)
        if len(peers) == 1:
            listener.close()
            return cls(rank, 1, None, algorithm=algorithm)
        me = Identity(rank, len(peers), _check_secret(secret), run)
        lanes: dict[tuple[int, Lane], socket.socket] = build_mesh(me, listener, lambda peer: peers[peer], deadline_s)
        return cls(rank, len(peers), TcpBackend(rank, len(peers), lanes, deadline_s), algorithm=algorithm)

    def allreduce(self, array: Array, op: str = "sum") -> Array:
        """Combine over all ranks, in place: "sum", "mean" or "max". Half types sum in float32."""
        check_reducible(array, op)
        algorithm = allreduce_algorithm(self.algorithm, array.nbytes)
        with self._turn() as backend:
            if backend is None:
                return array
            values = accumulator(array)
            call = Call("allreduce", self._next(), values.dtype.name, values.size, op, algorithm)
            schedule = allreduce_schedule(algorithm, self.rank, self.world_size, values.size)
            self._carry_out(backend, call, schedule.reduce, values)
            start, stop = schedule.owned
            finish(values[start:stop], op, self.world_size)
            self._carry_out(backend, call, schedule.gather, values)
            if values.dtype != array.dtype:
                array.reshape(-1)[:] = values
        return array

    def reduce_scatter(self, array: Array, op: str = "sum") -> Array:
        """This rank's block of the reduced flat array (blocks differ by at most one element)."""
        check_reducible(array, op)
        with self._turn() as backend:
            values = accumulator(array)
            values = values.copy() if values.dtype == array.dtype else values
            bounds = block_bounds(values.size, self.world_size)
            if backend is not None:
                call = Call("reduce_scatter", self._next(), values.dtype.name, values.size, op)
                self._carry_out(backend, call, ring.reduce_scatter(self.rank, bounds), values)
            mine = values[bounds[self.rank] : bounds[self.rank + 1]]
            finish(mine, op, self.world_size)
            return mine.astype(array.dtype)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Root's values on all ranks, in place."""
        check_in_place(array)
        self._check_peer(root)
        algorithm = broadcast_algorithm(self.algorithm)
        with self._turn() as backend:
            if backend is not None:
                call = Call("broadcast", self._next(), array.dtype.name, array.size, algorithm=algorithm, root=root)
                octets = array.reshape(-1).view(np.uint8)
                steps = BROADCAST[algorithm](self.rank, self.world_size, octets.size, root)
                self._carry_out(backend, call, steps, octets)
        return array

    def allgather(self, array: Array) -> Array:
        """Every rank's array (same shape and type on all), stacked: shape (world size, *shape)."""
        result = np.empty((self.world_size, *array.shape), array.dtype)
        result[self.rank] = array
        with self._turn() as backend:
            if backend is not None:
                call = Call("allgather", self._next(), array.dtype.name, array.size)
                bounds = [array.nbytes * peer for peer in range(self.world_size + 1)]
                octets = result.reshape(-1).view(np.uint8)
                self._carry_out(backend, call, ring.allgather(self.rank, bounds), octets)
        return result

    def allgather_bytes(self, data: bytes, *, limit: int = 1 << 28) -> list[bytes]:
        """Every rank's bytes; lengths may differ. More than ``limit`` bytes in all are refused."""
        sizes = self.allgather(np.array([len(data)], np.int64)).reshape(-1)
        if sizes.min() < 0 or int(sizes.sum()) > limit:
            raise CollectiveError(
                f"the ranks would gather {int(sizes.sum())} bytes, the limit is {limit} bytes.",
                fix="Gather less at a time, or pass a larger limit on every rank.",
            )
        bounds = [0, *np.cumsum(sizes).tolist()]
        octets = np.empty(bounds[-1], np.uint8)
        octets[bounds[self.rank] : bounds[self.rank + 1]] = np.frombuffer(data, np.uint8)
        with self._turn() as backend:
            if backend is not None:
                call = Call("allgather_bytes", self._next(), elements=bounds[-1])
                self._carry_out(backend, call, ring.allgather(self.rank, bounds), octets)
        return [octets[a:b].tobytes() for a, b in itertools.pairwise(bounds)]

    def alltoall(self, array: Array) -> Array:
        """Row q goes to rank q; row r of the result is what rank r had for this rank. Shape (world size, ...)."""
        if array.ndim < 1 or len(array) != self.world_size:
            raise CollectiveError(
                f"alltoall wants a row for each of {self.world_size} ranks, not an array of shape {array.shape}."
            )
        both = np.empty((2, *array.shape), array.dtype)
        both[0] = array
        both[1, self.rank] = array[self.rank]
        with self._turn() as backend:
            if backend is not None:
                call = Call("alltoall", self._next(), array.dtype.name, array.size)
                steps = pairwise.alltoall(self.rank, self.world_size, array.nbytes // self.world_size)
                self._carry_out(backend, call, steps, both.reshape(-1).view(np.uint8))
        result: Array = both[1]
        return result

    def shift(self, array: Array, by: int) -> Array:
        """The array of the rank ``by`` places before this one, around the circle; same shape and type on all.

        All ranks give the same ``by``; that one does not is noticed at the deadline only, by those who wait for it.
        """
        own = np.ascontiguousarray(array)
        result = own.copy()
        by %= self.world_size
        with self._turn() as backend:
            if backend is not None and by:
                call = Call("shift", self._next(), own.dtype.name, own.size, root=by)
                outgoing, incoming = own.reshape(-1).view(np.uint8), result.reshape(-1).view(np.uint8)
                to, of = (self.rank + by) % self.world_size, (self.rank - by) % self.world_size
                backend.exchange(call, (to, outgoing.data), (of, Replace(incoming.data)))
        return result

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with self._turn() as backend:
            if backend is not None:
                call = Call("barrier", self._next())
                steps = tree.barrier(self.rank, self.world_size)
                self._carry_out(backend, call, steps, np.empty(0, np.uint8))

    def send(self, array: Array, dst: int) -> None:
        """Send to one rank, which must call ``recv`` with an array of the same size and type."""
        self._message(np.ascontiguousarray(array), self.rank, dst)

    def recv(self, array: Array, src: int) -> Array:
        """Receive what rank ``src`` sends, in place."""
        check_in_place(array)
        self._message(array, src, self.rank)
        return array

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent so far; headers (``header_bytes_sent``) and handshakes are not in it."""
        return self._backend.bytes_sent if self._backend else 0

    @property
    def bytes_received(self) -> int:
        """Payload bytes received so far."""
        return self._backend.bytes_received if self._backend else 0

    @property
    def header_bytes_sent(self) -> int:
        """Bytes of frame headers sent so far."""
        return self._backend.header_bytes_sent if self._backend else 0

    @property
    def seconds_waiting(self) -> float:
        """Time in which nothing moved because a peer or the network was behind."""
        return self._backend.seconds_waiting if self._backend else 0.0

    def close(self, reason: str | None = None) -> None:
        """Leave; peers and threads that wait for this rank are woken. ``reason`` marks a failure."""
        self._closed = True
        if self._backend is None:
            return
        self._backend.close(reason)
        with self._lock:  # a thread inside is awake now and leaves within moments
            self._backend.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Backend | None]:
        """One call at a time; refuses on a broken or closed communicator."""
        with self._lock:
            backend = self._backend
            if backend is not None and backend.error is not None:
                raise backend.error
            if self._closed:
                raise CollectiveError(f"the communicator of rank {self.rank} is closed.")
            try:
                yield backend
            except CollectiveError:
                raise
            except BaseException as error:  # a frame may be half sent: no later call could be right
                self._closed = True
                if backend is not None:
                    backend.close(f"{type(error).__name__}: {error}")
                raise

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _carry_out(self, backend: Backend, call: Call, steps: Steps, values: Array) -> None:
        """Carry the steps of ``call`` out on the flat array ``values``."""
        octets = values.view(np.uint8).data
        size = values.itemsize
        for send, receive, reduce in steps:
            outgoing = incoming = None
            if send is not None:
                outgoing = (send.peer, octets[send.start * size : send.stop * size])
            if receive is not None:
                if reduce:
                    sink: Sink = self._reduction(call.op, values, send, receive)
                else:
                    sink = Replace(octets[receive.start * size : receive.stop * size])
                incoming = (receive.peer, sink)
            backend.exchange(call, outgoing, incoming)

    def _reduction(self, op: str, values: Array, send: Span | None, receive: Span) -> Reduce:
        target = values[receive.start : receive.stop]
        at_once = send is None or send.stop <= receive.start or receive.stop <= send.start
        need = scratch_elements(target, at_once=at_once)
        scratch = self._scratch.get(values.dtype.name)
        if scratch is None or len(scratch) < need:
            scratch = self._scratch[values.dtype.name] = np.empty(need, values.dtype)
        return Reduce(target, OPERATIONS[op], scratch, peer_first=receive.peer < self.rank, at_once=at_once)

    def _message(self, array: Array, src: int, dst: int) -> None:
        self._check_peer(src)
        self._check_peer(dst)
        if src == dst:
            raise CollectiveError(f"rank {src} cannot send to itself.")
        with self._turn() as backend:
            assert backend is not None  # a world of one has no second rank to name
            number = self._messages[src, dst] = self._messages.get((src, dst), 0) + 1
            call = Call("message", number, array.dtype.name, array.size)
            octets = array.reshape(-1).view(np.uint8)
            if src == self.rank:
                step = Step(Span(dst, 0, octets.size), None)
            else:
                step = Step(None, Span(src, 0, octets.size))
            self._carry_out(backend, call, (step,), octets)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.world_size:
            raise CollectiveError(f"there is no rank {peer}.", fix=f"Ranks are 0 to {self.world_size - 1}.")


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise CollectiveError(
            f"rank {rank} has no place among {world_size} ranks.", fix="Ranks are 0 to world_size - 1."
        )


def _check_secret(secret: bytes) -> bytes:
    if not secret:
        raise CollectiveError(
            "ranks that meet over the network need a secret.",
            fix="Pass the same secrets.token_bytes(32) to every rank of the run.",
        )
    return secret
