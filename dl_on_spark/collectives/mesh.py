"""Connections of every rank with every other: higher ranks connect, lower ranks accept.

Each pair has a data lane and a control lane. Accepting runs beside connecting, handles all pending
handshakes at once, gives each a few seconds, and refuses and logs what does not prove itself.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dl_on_spark.collectives.authentication import (
    Handshake,
    Identity,
    Lane,
    Refused,
    accepting,
    connecting,
)
from dl_on_spark.errors import CollectiveError, DeadlineExceeded

_log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""A pending connection that has not proved itself after this long is dropped."""

_REFUSED_S = 3.0  # a refusal may come from an old address; one that persists is the secret
_MAX_PENDING = 256  # strangers cannot use up file descriptors; ranks that are dropped try again
_BUFFER_BYTES = 4 * 1024 * 1024

Key = tuple[int, Lane]


def build_mesh(
    me: Identity, listener: socket.socket, address_of: Callable[[int], str], deadline_s: float
) -> dict[Key, socket.socket]:
    """Authenticated connections by (peer, lane); the listener is closed at the end, come what may.

    ``address_of(rank)`` gives "host:port" or raises LookupError while it is not yet known.
    """
    deadline = time.monotonic() + deadline_s
    wanted = {(peer, lane) for peer in range(me.rank + 1, me.world_size) for lane in (Lane.DATA, Lane.CONTROL)}
    acceptor = Acceptor(me, listener, wanted, deadline)
    lanes: dict[Key, socket.socket] = {}
    try:
        for peer in range(me.rank):
            for lane in (Lane.DATA, Lane.CONTROL):
                lanes[peer, lane] = connect(me, peer, lane, address_of, deadline)
        lanes.update(acceptor.result())
    except BaseException:
        acceptor.stop()
        for sock in lanes.values():
            sock.close()
        raise
    finally:
        listener.close()
    return lanes


def connect(me: Identity, peer: int, lane: Lane, address_of: Callable[[int], str], deadline: float) -> socket.socket:
    """One authenticated connection to ``peer``; tries again until the deadline while it is not up."""
    refused_until: float | None = None
    reason = "its address is not known"
    pause = 0.005
    while (left := deadline - time.monotonic()) > 0:
        try:
            host, _, port = address_of(peer).rpartition(":")
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=min(left, HANDSHAKE_S))
        except (OSError, LookupError) as error:
            reason = str(error) or type(error).__name__
        else:
            try:
                _shake(sock, connecting(me, peer, lane))
                return _tune(sock)
            except (OSError, Refused) as error:
                sock.close()
                reason = str(error) or type(error).__name__
                refused_until = refused_until or min(deadline, time.monotonic() + _REFUSED_S)
                if isinstance(error, Refused) and time.monotonic() > refused_until:
                    break
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(pause * 2, 0.2)
    else:
        raise DeadlineExceeded(
            f"rank {me.rank} could not connect to rank {peer} in time: {reason}.",
            fix=f"See whether rank {peer} started and its address can be reached from this host.",
        )
    raise CollectiveError(
        f"rank {me.rank} was refused by rank {peer}: {reason}.",
        fix="Give every rank of a run the same secret, run name and world size.",
    )


def _shake(sock: socket.socket, handshake: Handshake) -> None:
    """Drive the connector's handshake on a blocking socket with a timeout."""
    reply = b""
    until = time.monotonic() + HANDSHAKE_S
    try:
        outgoing, need = next(handshake)
        while True:
            sock.sendall(outgoing)
            reply = b""
            while len(reply) < need:
                sock.settimeout(max(0.001, until - time.monotonic()))
                chunk = sock.recv(need - len(reply))
                if not chunk:
                    raise Refused("it closed the connection; secret, run or world size differ")
                reply += chunk
            outgoing, need = handshake.send(reply)
    except StopIteration:
        return


@dataclass
class _Pending:
    sock: socket.socket
    address: str
    handshake: Handshake
    need: int
    until: float
    received: bytearray = field(default_factory=bytearray)


class Acceptor:
    """A thread that accepts ``wanted`` lanes on a listener until it has them or the deadline passes."""

    def __init__(self, me: Identity, listener: socket.socket, wanted: Iterable[Key], deadline: float) -> None:
        self._me = me
        self._listener = listener
        self._wanted = frozenset(wanted)
        self._deadline = deadline
        self._lanes: dict[Key, socket.socket] = {}
        self._refusals: list[str] = []
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="collectives-accept", daemon=True)
        self._thread.start()

    def result(self) -> dict[Key, socket.socket]:
        """The accepted lanes; DeadlineExceeded names the ranks that did not come."""
        self._thread.join()
        if self._failure is not None:
            raise CollectiveError(f"rank {self._me.rank} could not accept connections: {self._failure}.")
        missing = sorted({peer for peer, _ in self._wanted - self._lanes.keys()})
        if missing:
            self._close_lanes()
            refused = f" {len(self._refusals)} connections were refused, the last: {self._refusals[-1]}."
            raise DeadlineExceeded(
                f"rank {self._me.rank} waited in vain for the connection of rank"
                f"{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}."
                f"{refused if self._refusals else ''}",
                fix="See whether those ranks started, and with the same secret, run name and world size.",
            )
        return dict(self._lanes)

    def stop(self) -> None:
        """End early; what was accepted is closed."""
        self._stopped.set()
        self._thread.join()
        self._close_lanes()

    def _close_lanes(self) -> None:
        for sock in self._lanes.values():
            sock.close()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._listener.setblocking(False)
                selector.register(self._listener, selectors.EVENT_READ, None)
                try:
                    self._serve(selector)
                finally:
                    for key in list(selector.get_map().values()):
                        if key.data is not None:
                            key.data.sock.close()
        except OSError as error:
            self._failure = error

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while self._wanted - self._lanes.keys() and not self._stopped.is_set():
            now = time.monotonic()
            if now >= self._deadline:
                return
            for key, _ in selector.select(min(0.1, self._deadline - now)):
                if key.data is None:
                    self._admit(selector)
                else:
                    self._advance(selector, key.data)
            now = time.monotonic()
            pending = [key.data for key in selector.get_map().values() if key.data is not None]
            for late in [p for p in pending if p.until < now]:
                self._drop(selector, late, "it did not prove itself in time")

    def _admit(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, address = self._listener.accept()
            sock.setblocking(False)
            name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
            handshake = accepting(self._me)
            _, need = next(handshake)
            pending = _Pending(sock, name, handshake, need, time.monotonic() + HANDSHAKE_S)
            if len(selector.get_map()) > _MAX_PENDING:
                oldest = min((k.data for k in selector.get_map().values() if k.data is not None), key=lambda p: p.until)
                self._drop(selector, oldest, "too many connections are pending")
            selector.register(sock, selectors.EVENT_READ, pending)

    def _advance(self, selector: selectors.BaseSelector, pending: _Pending) -> None:
        try:
            chunk = pending.sock.recv(pending.need - len(pending.received))
            if not chunk:
                raise Refused("it closed the connection before it proved itself")
            pending.received += chunk
            while len(pending.received) == pending.need:
                reply, pending.need = pending.handshake.send(bytes(pending.received))
                pending.received.clear()
                pending.sock.sendall(reply)
                if pending.need == 0:
                    pending.handshake.send(b"")
        except StopIteration as done:
            selector.unregister(pending.sock)
            key: Key = done.value
            if key not in self._wanted:
                pending.sock.close()
                return
            if (earlier := self._lanes.pop(key, None)) is not None:
                earlier.close()  # the peer gave that attempt up and proved itself anew
            self._lanes[key] = _tune(pending.sock)
        except BlockingIOError:
            return
        except (OSError, Refused) as error:
            self._drop(selector, pending, str(error))

    def _drop(self, selector: selectors.BaseSelector, pending: _Pending, reason: str) -> None:
        selector.unregister(pending.sock)
        pending.sock.close()
        self._refusals.append(f"{pending.address}: {reason}")
        del self._refusals[:-100]
        _log.warning("rank %d refused a connection from %s: %s", self._me.rank, pending.address, reason)


def _tune(sock: socket.socket) -> socket.socket:
    """No delay for small frames, room for large ones, and never a blocking call."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        # A size above the kernel's limit would be cut to it and end automatic growth: worse than none.
        with contextlib.suppress(OSError, ValueError):
            if int(Path("/proc/sys/net/core", limit).read_text()) >= _BUFFER_BYTES:
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    sock.setblocking(False)
    return sock
