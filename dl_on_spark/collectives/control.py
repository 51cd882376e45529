"""Control lanes: how ranks hear of each other's end at once, whatever they are waiting for.

A control lane is silent until its peer leaves or fails. End of file without a notice means that
the peer's process died.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterable

from dl_on_spark.collectives.wire import NOTICE_LIMIT, Notice, NoticeKind, decode_notice


class ControlLanes:
    """The control lanes of one rank, and what was heard on them (``notices`` by peer)."""

    def __init__(self, socks: dict[int, socket.socket]) -> None:
        self._socks = socks
        self._peer_of = {sock.fileno(): peer for peer, sock in socks.items()}
        self._received: dict[int, bytearray] = {peer: bytearray() for peer in socks}
        self._poll = select.poll()
        for fd in self._peer_of:
            self._poll.register(fd, select.POLLIN)
        self.notices: dict[int, Notice] = {}

    def wait(self, data: dict[int, int], timeout_s: float) -> tuple[bool, list[int]]:
        """Wait for data sockets ({fd: poll mask}) or news; (any data ready, peers with a new notice)."""
        for fd, mask in data.items():
            self._poll.register(fd, mask)
        try:
            events = self._poll.poll(max(1, int(timeout_s * 1000)))
        finally:
            for fd in data:
                self._poll.unregister(fd)
        ready, news = False, []
        for fd, _ in events:
            peer = self._peer_of.get(fd)
            if peer is None:
                ready = True
            elif self._read(peer):
                news.append(peer)
        return ready, news

    def last_word(self, peer: int, timeout_s: float) -> Notice | None:
        """The notice of a peer whose data lane broke; None if it says nothing in time."""
        until = time.monotonic() + timeout_s
        while peer not in self.notices and time.monotonic() < until:
            self.wait({}, until - time.monotonic())
        return self.notices.get(peer)

    def listen(self, peers: Iterable[int], timeout_s: float) -> None:
        """Collect notices until all of ``peers`` have given one or the time is over."""
        until = time.monotonic() + timeout_s
        missing = set(peers) - self.notices.keys()
        while missing and time.monotonic() < until:
            self.wait({}, until - time.monotonic())
            missing -= self.notices.keys()

    def tell(self, notice: Notice) -> None:
        """This rank's last word to all peers; never waits (a notice fits in any socket buffer)."""
        data = notice.encode()
        for sock in self._socks.values():
            with contextlib.suppress(OSError):
                sock.send(data)
                sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._socks.values():
            sock.close()

    def _read(self, peer: int) -> bool:
        """Read what ``peer`` says; true when its notice is complete (it then says no more)."""
        received = self._received[peer]
        try:
            chunk = self._socks[peer].recv(NOTICE_LIMIT)
        except BlockingIOError:
            return False
        except OSError as error:
            notice: Notice | None = Notice(NoticeKind.FAILED, peer, f"rank {peer} was lost ({error})")
        else:
            received += chunk
            try:
                notice = decode_notice(received)
            except ValueError as error:
                notice = Notice(NoticeKind.FAILED, peer, f"rank {peer} sent no valid notice ({error})")
            if notice is None and not chunk:
                notice = Notice(NoticeKind.FAILED, peer, f"rank {peer} died (its connection closed)")
        if notice is None:
            return False
        self.notices[peer] = notice
        self._poll.unregister(self._socks[peer].fileno())
        return True
