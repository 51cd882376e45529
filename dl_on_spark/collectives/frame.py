"""One frame on its way out or in, over a non-blocking socket."""

from __future__ import annotations

import socket

from dl_on_spark.collectives.sink import Sink
from dl_on_spark.collectives.wire import HEADER_BYTES


class Outgoing:
    """A header and a payload; small ones leave in one call. ``left`` counts the bytes to go."""

    __slots__ = ("_header", "_payload", "left", "peer", "size", "sock")

    def __init__(self, peer: int, sock: socket.socket, header: bytes, payload: memoryview) -> None:
        self.peer = peer
        self.sock = sock
        self._header = header
        self._payload = payload
        self.size = self.left = HEADER_BYTES + len(payload)

    def push(self) -> int:
        """Send what the socket takes; BlockingIOError when it takes nothing."""
        sent = self.size - self.left
        if sent < HEADER_BYTES:
            count = self.sock.sendmsg((self._header[sent:], self._payload))
        else:
            count = self.sock.send(self._payload[sent - HEADER_BYTES :])
        self.left -= count
        return count


class Incoming:
    """The frame that must come: its header byte for byte, and where the payload goes.

    Never more than the expected length is read, whatever the peer says.
    """

    __slots__ = ("_expected", "_header", "left", "peer", "sink", "size", "sock")

    def __init__(self, peer: int, sock: socket.socket, expected: bytes, sink: Sink) -> None:
        self.peer = peer
        self.sock = sock
        self._expected = expected
        self._header = bytearray(HEADER_BYTES)
        self.sink = sink
        self.size = self.left = HEADER_BYTES + sink.nbytes

    def pull(self) -> int:
        """Read what is there; 0 at the end of the stream, BlockingIOError when nothing is there.

        Wrong raises ``Unexpected`` as soon as the header is whole.
        """
        got = self.size - self.left
        if got >= HEADER_BYTES:
            count = body = self.sock.recv_into(self.sink.window())
        else:
            places = [memoryview(self._header)[got:], self.sink.window()]
            count = self.sock.recvmsg_into(places)[0]
            body = got + count - HEADER_BYTES
            if body >= 0 and self._header != self._expected:
                raise Unexpected(bytes(self._header))
        if body > 0:
            self.sink.advance(body)
        self.left -= count
        return count


class Unexpected(Exception):
    """Another header than the expected one arrived. Stays inside this package."""

    def __init__(self, header: bytes) -> None:
        super().__init__(header)
        self.header = header
