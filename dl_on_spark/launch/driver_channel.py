"""The driver's end of the channel: a TCP server that every worker reports to.

One connection per worker, authenticated both ways (see :mod:`dl_on_spark.launch.frames`), and
short ones of the barrier tasks that report a dead worker. All messages go into one queue, in the
order of their arrival.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from queue import SimpleQueue

from dl_on_spark.launch.frames import FrameError, encode, greet_worker, read_frame
from dl_on_spark.launch.request import Message

_HANDSHAKE_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 5.0


class ChannelServer:
    """Listens at ``address`` and puts a :class:`Message` into `inbox` for each frame.

    Besides what the workers send there are the kinds ``hello`` (a worker connected: host, pid), ``bye``
    (it has said all it had to say) and ``lost`` (its connection ended without a ``bye``).
    """

    def __init__(
        self, secret: bytes, inbox: SimpleQueue[Message], *, bind_host: str = "", host: str = "127.0.0.1"
    ) -> None:
        self._secret = secret
        self._inbox = inbox
        self._lock = threading.Lock()
        self._links: dict[int, socket.socket] = {}
        self._open: set[socket.socket] = set()
        self._last_sequence: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._server = socket.create_server((bind_host, 0), backlog=256)
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="channel-accept", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> ChannelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> set[int]:
        """Ranks whose worker is connected now."""
        with self._lock:
            return set(self._links)

    def send(self, rank: int, kind: str) -> bool:
        """Tell the worker of `rank` something ("stop", "where"); False when it is not connected."""
        with self._lock:
            link = self._links.get(rank)
        if link is None:
            return False
        try:
            link.sendall(encode({"kind": kind}))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close every connection and join every thread."""
        with self._lock:
            self._closed = True
            links = list(self._open)
        for link in (self._server, *links):
            with contextlib.suppress(OSError):  # wakes a thread blocked in accept() or recv()
                link.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(_JOIN_TIMEOUT_S)
        self._server.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    link.close()
                    return
                self._open.add(link)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._serve, args=(link,), name="channel-worker", daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, link: socket.socket) -> None:
        rank = None
        try:
            link.settimeout(_HANDSHAKE_TIMEOUT_S)
            identity = greet_worker(link, self._secret)
            sender = int(identity["rank"])
            # Silence is judged by the launcher, which knows the run's deadline; sends stay bounded.
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMEOUT_S))
            if identity.get("role") == "worker":
                rank = sender
                with self._lock:
                    self._links[rank] = link
                self._put(rank, "hello", {"host": identity.get("host"), "pid": identity.get("pid")})
            if self._read_all(link, sender):
                self._forget(rank, link)
                if rank is not None:
                    self._put(rank, "bye", {})
        except (OSError, FrameError, KeyError, TypeError, ValueError):
            pass  # a stranger, or a connection that broke: the launcher judges by what is missing
        finally:
            if rank is not None and self._forget(rank, link):
                self._put(rank, "lost", {})
            with self._lock:
                self._open.discard(link)
            link.close()

    def _read_all(self, link: socket.socket, sender: int) -> bool:
        """Queue every frame until the end; True when the worker said good-bye."""
        while (frame := read_frame(link.recv)) is not None:
            kind = str(frame.pop("kind", ""))
            sequence = int(frame.pop("sequence", 0))
            if kind == "bye":
                return True
            # A worker that reconnects repeats the frame it was sending when the connection broke.
            if sequence and sequence <= self._last_sequence.get(sender, 0):
                continue
            self._last_sequence[sender] = max(sequence, self._last_sequence.get(sender, 0))
            self._put(sender, kind, frame)
        return False

    def _forget(self, rank: int | None, link: socket.socket) -> bool:
        """Drop the connection of `rank` if it still is `link`; True if it was and we are open."""
        with self._lock:
            if rank is None or self._links.get(rank) is not link:
                return False
            del self._links[rank]
            return not self._closed

    def _put(self, rank: int, kind: str, fields: dict[str, object]) -> None:
        self._inbox.put(Message(rank, kind, fields, time.time()))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
