"""Requests and answers between any two ranks, beside the collectives and in no common order.

What an asynchronous strategy needs: a rank asks all ranks at once, itself too, and each answers when it is ready,
on a thread of its own. A pair of ranks has two connections, authenticated as those of the mesh are: on one the
lower rank asks, on the other the higher. Sizes are agreed on beforehand, so a peer's word decides nothing.
Nobody of this rank may be in a collective while a failure is found here: its cause is heard on the control lanes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from dl_on_spark.collectives.authentication import Lane
from dl_on_spark.collectives.frame import Incoming, Outgoing, Unexpected
from dl_on_spark.collectives.sink import Replace
from dl_on_spark.collectives.tcp import TcpBackend
from dl_on_spark.collectives.wire import Call
from dl_on_spark.errors import CollectiveError


class Requests:
    """One rank's ends of the connections: `ask` for the one who asks, `Answers` for the one who answers."""

    def __init__(
        self,
        tcp: TcpBackend,
        rank: int,
        lanes: dict[tuple[int, Lane], socket.socket],
        request_bytes: int,
        answer_bytes: int,
    ) -> None:
        self._tcp, self._rank = tcp, rank
        self._request_bytes, self._answer_bytes = request_bytes, answer_bytes
        self._number = 0
        own = socket.socketpair()
        for sock in own:
            sock.setblocking(False)
        self._asking, answering = {rank: own[0]}, {rank: own[1]}
        for (peer, lane), sock in lanes.items():
            ours = lane is (Lane.DATA if rank < peer else Lane.CONTROL)
            (self._asking if ours else answering)[peer] = sock
        self.answers = Answers(rank, answering, request_bytes, answer_bytes)
        self.deadline_s = tcp.deadline_s
        self._asked = self._told = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes of requests and answers sent to other ranks so far."""
        return self._asked + self.answers.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of requests and answers of other ranks received so far."""
        return self._told + self.answers.bytes_received

    def ask(
        self,
        requests: Sequence[memoryview],
        answers: Sequence[memoryview],
        suspect: Callable[[list[int]], int],
    ) -> None:
        """Send each rank its request and return when all answers are there.

        When nothing moves for the deadline, DeadlineExceeded blames the one whom ``suspect`` picks, told who has
        not answered. A peer that dies or leaves raises CollectiveError at once, even if its answer has come.
        """
        self._number += 1
        out: dict[int, Outgoing] = {}
        into: dict[int, Incoming] = {}
        asked = _request(self._number, self._request_bytes).header(self._request_bytes)
        told = _answer(self._number, self._answer_bytes).header(self._answer_bytes)
        for peer, sock in self._asking.items():
            out[peer] = Outgoing(peer, sock, asked, requests[peer])
            into[peer] = Incoming(peer, sock, told, Replace(answers[peer]))
        others = len(self._asking) - 1
        self._asked += others * self._request_bytes
        self._told += others * self._answer_bytes
        poll, peer_of = select.poll(), {}
        for peer, sock in self._asking.items():
            poll.register(sock, select.POLLIN | select.POLLOUT)
            peer_of[sock.fileno()] = peer
        last = time.monotonic()
        while into:
            left = last + self.patience_s - time.monotonic()
            events = poll.poll(max(0.0, left) * 1000)
            if not events and left <= 0:
                self.stalled(suspect(sorted(into)))
            for fd, mask in events:
                peer = peer_of[fd]
                if mask & select.POLLOUT and peer in out and self._push(out[peer]):
                    del out[peer]
                    poll.modify(fd, select.POLLIN)
                if mask & ~select.POLLOUT:
                    if peer not in into:
                        self.lost(peer)  # nothing can come after an answer but the end
                    if self._pull(into[peer]):
                        del into[peer]
                last = time.monotonic()

    def lost(self, peer: int) -> NoReturn:
        """The connection to ``peer`` ended: raise what its control lane says of it."""
        if peer == self._rank:
            raise CollectiveError(f"the server of rank {peer} ended.")
        self._tcp.lost(_request(self._number, self._request_bytes), peer)

    def stalled(self, peer: int) -> NoReturn:
        """``peer`` was silent for the deadline: tell all, and raise."""
        self._tcp.stalled(_request(self._number, self._request_bytes), peer)

    def close(self) -> None:
        """Close the connections; nobody may be in `ask` or wait for requests."""
        for sock in self._asking.values():
            sock.close()
        self.answers.close()

    @property
    def patience_s(self) -> float:
        """Before a rank gives up, a tenth is left for what the others say of it."""
        return self.deadline_s - min(1.0, self.deadline_s / 10)

    def _push(self, out: Outgoing) -> bool:
        """Whether all has left."""
        try:
            out.push()
        except BlockingIOError:
            return False
        except OSError:
            self.lost(out.peer)
        return out.left == 0

    def _pull(self, into: Incoming) -> bool:
        """Whether all has come."""
        try:
            if into.pull() == 0:
                self.lost(into.peer)
        except BlockingIOError:
            return False
        except OSError:
            self.lost(into.peer)
        except Unexpected as unexpected:
            self._tcp.mismatch(_answer(self._number, self._answer_bytes), into.peer, unexpected.header)
        return into.left == 0


class Answers:
    """The answering end: one thread waits for requests, and answers each when it likes, but only once."""

    def __init__(self, rank: int, socks: dict[int, socket.socket], request_bytes: int, answer_bytes: int) -> None:
        self._rank, self._socks = rank, socks
        self._request_bytes, self._answer_bytes = request_bytes, answer_bytes
        self.bytes_sent = self.bytes_received = 0
        self._peer_of = {sock.fileno(): peer for peer, sock in socks.items()}
        self._buffers = {peer: bytearray(request_bytes) for peer in socks}
        self._numbers = dict.fromkeys(socks, 0)
        self._into = {peer: self._next(peer) for peer in socks}
        self._out: dict[int, Outgoing] = {}
        self._bell, self._ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        for sock in socks.values():
            self._poll.register(sock, select.POLLIN)
        self.gone: set[int] = set()
        """Peers that have left, died or sent what is no request."""

    @property
    def unsent(self) -> list[int]:
        """Peers whose answer has not left whole."""
        return sorted(self._out)

    def wait(self, timeout_s: float | None) -> list[tuple[int, memoryview]]:
        """Requests that have come whole, by peer; empty after `wake`, when somebody left, or after the time.

        A request's bytes are good until it is answered.
        """
        came: list[tuple[int, memoryview]] = []
        for fd, mask in self._poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000):
            if fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell, 4096)
                continue
            peer = self._peer_of[fd]
            try:
                if mask & select.POLLOUT and peer in self._out:
                    self._push(peer)
                if mask & ~select.POLLOUT:
                    into = self._into[peer]
                    if into.left == 0 or into.pull() == 0:  # one request at a time: more is no request
                        self._leave(peer)
                    elif into.left == 0:
                        came.append((peer, memoryview(self._buffers[peer])))
                        self.bytes_received += self._request_bytes * (peer != self._rank)
            except BlockingIOError:
                continue
            except (OSError, Unexpected):
                self._leave(peer)
        return came

    def answer(self, peer: int, data: bytes | bytearray) -> None:
        """Answer the request of ``peer``; what the connection does not take now leaves in `wait`."""
        if peer in self.gone:
            return
        header = _answer(self._numbers[peer], self._answer_bytes).header(len(data))
        self.bytes_sent += len(data) * (peer != self._rank)
        self._out[peer] = Outgoing(peer, self._socks[peer], header, memoryview(data))
        self._into[peer] = self._next(peer)
        try:
            self._push(peer)
        except BlockingIOError:
            self._poll.modify(self._socks[peer], select.POLLIN | select.POLLOUT)
        except OSError:
            self._leave(peer)

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._ringer, b"!")

    def hang_up(self) -> None:
        """End all connections, so that all who wait for an answer notice."""
        for sock in self._socks.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; nobody may be in `wait`."""
        for sock in self._socks.values():
            sock.close()
        os.close(self._bell)
        os.close(self._ringer)

    def _next(self, peer: int) -> Incoming:
        self._numbers[peer] += 1
        expected = _request(self._numbers[peer], self._request_bytes).header(self._request_bytes)
        return Incoming(peer, self._socks[peer], expected, Replace(memoryview(self._buffers[peer])))

    def _push(self, peer: int) -> None:
        out = self._out[peer]
        while out.left:
            out.push()
        del self._out[peer]
        self._poll.modify(self._socks[peer], select.POLLIN)

    def _leave(self, peer: int) -> None:
        self.gone.add(peer)
        self._out.pop(peer, None)
        self._poll.unregister(self._socks[peer])


def _request(number: int, nbytes: int) -> Call:
    return Call("request", number, elements=nbytes)


def _answer(number: int, nbytes: int) -> Call:
    return Call("answer", number, elements=nbytes)
