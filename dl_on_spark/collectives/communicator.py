"""The public door: collectives among the ranks of one run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from dl_on_spark.collectives.authentication import Identity, Lane
from dl_on_spark.collectives.choice import (
    allreduce_algorithm,
    broadcast_algorithm,
    check_algorithm,
)
from dl_on_spark.collectives.hierarchical import Hierarchical
from dl_on_spark.collectives.host import find_hosts
from dl_on_spark.collectives.mesh import build_mesh
from dl_on_spark.collectives.reduction import (
    Array,
    accumulator,
    check_in_place,
    check_reducible,
    dtype_name,
)
from dl_on_spark.collectives.rendezvous import ADDRESS_BYTES, join_address, listen, meet
from dl_on_spark.collectives.requests import Requests
from dl_on_spark.collectives.schedule import block_bounds
from dl_on_spark.collectives.scheduled import Scheduled
from dl_on_spark.collectives.shared import SharedMemory
from dl_on_spark.collectives.sink import Replace
from dl_on_spark.collectives.tcp import TcpBackend
from dl_on_spark.collectives.wire import Call
from dl_on_spark.errors import CollectiveError

_BACKENDS = ("auto", "tcp", "shm")
_log = logging.getLogger(__name__)


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
        tcp: TcpBackend | None,
        *,
        backend: str = "auto",
        algorithm: str = "auto",
        identity: Identity | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.algorithm = check_algorithm(algorithm)
        self._tcp = tcp
        self._identity = identity
        self._lock = threading.Lock()
        self._closed = False
        self._sequence = 0
        self._messages: dict[tuple[int, int], int] = {}
        self._shared: SharedMemory | None = None
        self._beside: list[Requests] = []
        if tcp is not None:
            self._scheduled = Scheduled(tcp, rank, range(world_size), world_size)
            self._best: Scheduled | SharedMemory = self._scheduled
            if backend != "tcp":
                self._share_memory(tcp, required=backend == "shm")

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

        ``backend`` "auto" is shared memory among ranks of one host, with TCP between hosts, and TCP alone
        where memory cannot be shared; there "shm" raises CollectiveError. Give all ranks the same. A named
        ``algorithm`` is carried out over TCP.
        ``secret`` must be the same on all ranks and known to nobody else (``secrets.token_bytes(32)``).
        ``host`` is this rank's address as others reach it; it listens there only, and only until
        all are connected. ``run`` tells apart runs that share a secret.
        """
        _check_place(rank, world_size)
        _check_choice(backend, algorithm)
        if world_size == 1:
            return cls(rank, 1, None, algorithm=algorithm)
        me = Identity(rank, world_size, _check_secret(secret), run)
        tcp = TcpBackend(rank, world_size, meet(me, rendezvous, host, deadline_s), deadline_s)
        return cls(rank, world_size, tcp, backend=backend, algorithm=algorithm, identity=me)

    @classmethod
    def from_listener(
        cls,
        listener: socket.socket,
        rank: int,
        peers: Sequence[str],
        secret: bytes,
        *,
        backend: str = "auto",
        algorithm: str = "auto",
        deadline_s: float = 60,
        run: str = "",
    ) -> Self:
        """The ranks listen already and know each other: ``peers[r]`` is rank r's "host:port".

        The communicator takes the listener over and closes it once all ranks are connected.
        """
        _check_place(rank, len(peers))
        _check_choice(backend, algorithm)
        if len(peers) == 1:
            listener.close()
            return cls(rank, 1, None, algorithm=algorithm)
        me = Identity(rank, len(peers), _check_secret(secret), run)
        lanes: dict[tuple[int, Lane], socket.socket] = build_mesh(me, listener, lambda peer: peers[peer], deadline_s)
        tcp = TcpBackend(rank, len(peers), lanes, deadline_s)
        return cls(rank, len(peers), tcp, backend=backend, algorithm=algorithm, identity=me)

    def allreduce(self, array: Array, op: str = "sum") -> Array:
        """Combine over all ranks, in place: "sum", "mean" or "max". Half types sum in float32."""
        check_reducible(array, op)
        with self._turn() as way:
            if way is None:
                return array
            values = accumulator(array)
            algorithm = allreduce_algorithm(self.algorithm, array.nbytes) if way.schedules else ""
            way.allreduce(Call("allreduce", self._next(), dtype_name(values.dtype), values.size, op, algorithm), values)
            if values.dtype != array.dtype:
                array.reshape(-1)[:] = values
        return array

    def reduce_scatter(self, array: Array, op: str = "sum") -> Array:
        """This rank's block of the reduced flat array (blocks differ by at most one element)."""
        check_reducible(array, op)
        with self._turn() as way:
            values = accumulator(array)
            values = values.copy() if values.dtype == array.dtype else values
            if way is not None:
                way.reduce_scatter(
                    Call("reduce_scatter", self._next(), dtype_name(values.dtype), values.size, op), values
                )
            bounds = block_bounds(values.size, self.world_size)
            return values[bounds[self.rank] : bounds[self.rank + 1]].astype(array.dtype)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Root's values on all ranks, in place."""
        check_in_place(array)
        self._check_peer(root)
        with self._turn() as way:
            if way is not None:
                algorithm = broadcast_algorithm(self.algorithm) if way.schedules else ""
                call = Call(
                    "broadcast", self._next(), dtype_name(array.dtype), array.size, algorithm=algorithm, root=root
                )
                way.broadcast(call, array.reshape(-1).view(np.uint8))
        return array

    def allgather(self, array: Array) -> Array:
        """Every rank's array (same shape and type on all), stacked: shape (world size, *shape)."""
        result = np.empty((self.world_size, *array.shape), array.dtype)
        result[self.rank] = array
        with self._turn() as way:
            if way is not None:
                call = Call("allgather", self._next(), dtype_name(array.dtype), array.size)
                bounds = [array.nbytes * peer for peer in range(self.world_size + 1)]
                way.allgather(call, result.reshape(-1).view(np.uint8), bounds)
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
        with self._turn() as way:
            if way is not None:
                way.allgather(Call("allgather_bytes", self._next(), elements=bounds[-1]), octets, bounds)
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
        with self._turn() as way:
            if way is not None:
                call = Call("alltoall", self._next(), dtype_name(array.dtype), array.size)
                self._scheduled.alltoall(call, both.reshape(-1).view(np.uint8))
        result: Array = both[1]
        return result

    def shift(self, array: Array, by: int) -> Array:
        """The array of the rank ``by`` places before this one, around the circle; same shape and type on all.

        All ranks give the same ``by``; that one does not is noticed at the deadline only, by those who wait for it.
        """
        own = np.ascontiguousarray(array)
        result = own.copy()
        by %= self.world_size
        with self._turn():
            if self._tcp is not None and by:
                call = Call("shift", self._next(), dtype_name(own.dtype), own.size, root=by)
                outgoing, incoming = own.reshape(-1).view(np.uint8), result.reshape(-1).view(np.uint8)
                to, of = (self.rank + by) % self.world_size, (self.rank - by) % self.world_size
                self._tcp.exchange(call, (to, outgoing.data), (of, Replace(incoming.data)))
        return result

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with self._turn() as way:
            if way is not None:
                way.barrier(Call("barrier", self._next()))

    def send(self, array: Array, dst: int) -> None:
        """Send to one rank, which must call ``recv`` with an array of the same size and type."""
        self._message(np.ascontiguousarray(array), self.rank, dst)

    def recv(self, array: Array, src: int) -> Array:
        """Receive what rank ``src`` sends, in place."""
        check_in_place(array)
        self._message(array, src, self.rank)
        return array

    def allreduce_way(self, nbytes: int) -> str:
        """What carries an allreduce of so many bytes: "shared_memory", or the algorithm over TCP.

        With several ranks on each of several hosts, the algorithm is that between the hosts.
        """
        if self._tcp is None:
            return "none"
        if self.algorithm == "auto" and self._best is self._shared:
            return "shared_memory"
        return allreduce_algorithm(self.algorithm, nbytes)

    def requests(self, request_bytes: int, answer_bytes: int) -> Requests:
        """Open connections for requests and answers of these sizes beside the collectives. All ranks call it.

        The caller closes them before the communicator.
        """
        if self._tcp is None or self._identity is None:
            raise CollectiveError("a world of one has nobody to ask.")
        listener = listen(self._tcp.address)
        here = join_address(*listener.getsockname()[:2]).encode()
        try:
            told = self.allgather(np.frombuffer(here.ljust(ADDRESS_BYTES), np.uint8))
        except BaseException:
            listener.close()
            raise
        me = dataclasses.replace(self._identity, run=f"{self._identity.run}\0requests {self._sequence}")
        lanes = build_mesh(me, listener, lambda peer: told[peer].tobytes().decode().strip(), self._tcp.deadline_s)
        opened = Requests(self._tcp, self.rank, lanes, request_bytes, answer_bytes)
        self._beside.append(opened)
        return opened

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent so far; headers (``header_bytes_sent``) and handshakes are not in it.

        What a rank puts into shared memory counts once, however many ranks read it.
        """
        own = self._tcp.bytes_sent if self._tcp else 0
        return own + sum(requests.bytes_sent for requests in self._beside)

    @property
    def bytes_received(self) -> int:
        """Payload bytes received so far."""
        own = self._tcp.bytes_received if self._tcp else 0
        return own + sum(requests.bytes_received for requests in self._beside)

    @property
    def header_bytes_sent(self) -> int:
        """Bytes of frame headers sent so far."""
        return self._tcp.header_bytes_sent if self._tcp else 0

    @property
    def seconds_waiting(self) -> float:
        """Time in which nothing moved because a peer or the network was behind."""
        return self._tcp.seconds_waiting if self._tcp else 0.0

    def close(self, reason: str | None = None) -> None:
        """Leave; peers and threads that wait for this rank are woken. ``reason`` marks a failure."""
        self._closed = True
        if self._tcp is None:
            return
        self._tcp.close(reason)
        with self._lock:  # a thread inside is awake now and leaves within moments
            self._tcp.release()
            if self._shared is not None:
                self._shared.close()
                self._shared = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Scheduled | SharedMemory | None]:
        """One call at a time, and the way it goes (None: a world of one); refuses when broken or closed."""
        with self._lock:
            tcp = self._tcp
            if tcp is not None and tcp.error is not None:
                raise tcp.error
            if self._closed:
                raise CollectiveError(f"the communicator of rank {self.rank} is closed.")
            try:
                yield None if tcp is None else self._best if self.algorithm == "auto" else self._scheduled
            except CollectiveError:
                raise
            except BaseException as error:  # a frame may be half sent: no later call could be right
                self._closed = True
                if tcp is not None:
                    tcp.close(f"{type(error).__name__}: {error}")
                raise

    def _share_memory(self, tcp: TcpBackend, *, required: bool) -> None:
        """Share memory with the ranks of this host; all ranks come to the same answer."""
        try:
            with self._turn():
                hosts = find_hosts(tcp, self.rank, self._scheduled)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        tcp.bytes_sent = tcp.bytes_received = tcp.header_bytes_sent = tcp.header_bytes_received = 0
        tcp.seconds_waiting = 0.0
        self._shared = hosts.shared
        if hosts.usable and len(hosts.groups) == 1 and hosts.shared is not None:
            self._best = hosts.shared
        elif hosts.usable:
            self._best = Hierarchical(tcp, self.rank, self.world_size, hosts.groups, hosts.shared)
        elif required:
            reason = hosts.problem or "no two ranks are on one host"
            self.close()
            raise CollectiveError(
                f"the ranks cannot share memory: {reason}.",
                fix='Use backend="auto", which takes TCP where memory cannot be shared.',
            )
        elif hosts.problem and self.rank == 0:
            _log.warning("the ranks exchange over TCP, since they cannot share memory: %s", hosts.problem)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _message(self, array: Array, src: int, dst: int) -> None:
        self._check_peer(src)
        self._check_peer(dst)
        if src == dst:
            raise CollectiveError(f"rank {src} cannot send to itself.")
        with self._turn():
            assert self._tcp is not None  # a world of one has no second rank to name
            number = self._messages[src, dst] = self._messages.get((src, dst), 0) + 1
            call = Call("message", number, dtype_name(array.dtype), array.size)
            octets = array.reshape(-1).view(np.uint8).data
            if src == self.rank:
                self._tcp.exchange(call, (dst, octets), None)
            else:
                self._tcp.exchange(call, None, (src, Replace(octets)))

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.world_size:
            raise CollectiveError(f"there is no rank {peer}.", fix=f"Ranks are 0 to {self.world_size - 1}.")


def _check_place(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise CollectiveError(
            f"rank {rank} has no place among {world_size} ranks.", fix="Ranks are 0 to world_size - 1."
        )


def _check_choice(backend: str, algorithm: str) -> None:
    if backend not in _BACKENDS:
        raise CollectiveError(f"there is no backend {backend!r}.", fix=f"Use: {', '.join(_BACKENDS)}.")
    check_algorithm(algorithm)


def _check_secret(secret: bytes) -> bytes:
    if not secret:
        raise CollectiveError(
            "ranks that meet over the network need a secret.",
            fix="Pass the same secrets.token_bytes(32) to every rank of the run.",
        )
    return secret
