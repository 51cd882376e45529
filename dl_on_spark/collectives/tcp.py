"""The TCP backend: carries out one step of a schedule over non-blocking sockets.

Sending and receiving interleave on one thread, so two ranks that send each other more than the
socket buffers hold do not deadlock. A wait spins for a moment (`SPIN_S`) and then blocks in ``poll``
on the data and on all control lanes until the deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import select
import socket
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from dl_on_spark.collectives.authentication import Lane
from dl_on_spark.collectives.control import ControlLanes
from dl_on_spark.collectives.frame import Incoming, Outgoing, Unexpected
from dl_on_spark.collectives.sink import Sink
from dl_on_spark.collectives.wire import HEADER_BYTES, Call, Notice, NoticeKind, describe_header
from dl_on_spark.errors import CollectiveError, DeadlineExceeded

SPIN_S = 50e-6
"""About what waking a sleeping thread costs. Not longer, and without giving the core away: a thread that yields comes
back after the others of its core have had their turn, 4 ms each, while one that sleeps is woken before them."""

_GRACE_S = 1.0  # for the other ranks' last words, so that all name the same culprit


class Backend(Protocol):
    """What carries out steps; another backend is another class with these members."""

    bytes_sent: int
    bytes_received: int
    header_bytes_sent: int
    header_bytes_received: int
    seconds_waiting: float
    error: CollectiveError | None

    def exchange(self, call: Call, send: tuple[int, memoryview] | None, receive: tuple[int, Sink] | None) -> None:
        """Send to one peer and receive from one, at the same time."""
        ...

    def close(self, reason: str | None) -> None:
        """Tell the peers and wake whoever waits here."""
        ...

    def release(self) -> None:
        """Give everything back; nobody is in ``exchange``."""
        ...


class TcpBackend:
    """Exchanges over the mesh's data lanes; failures are heard and told on its control lanes."""

    def __init__(
        self, rank: int, world_size: int, lanes: dict[tuple[int, Lane], socket.socket], deadline_s: float
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self.deadline_s = deadline_s
        self._data = {peer: sock for (peer, lane), sock in lanes.items() if lane is Lane.DATA}
        self._control = ControlLanes({peer: sock for (peer, lane), sock in lanes.items() if lane is Lane.CONTROL})
        self._spin_s = SPIN_S
        self._closing = False
        self.bytes_sent = self.bytes_received = 0
        self.header_bytes_sent = self.header_bytes_received = 0
        self.seconds_waiting = 0.0
        self.error: CollectiveError | None = None

    def exchange(self, call: Call, send: tuple[int, memoryview] | None, receive: tuple[int, Sink] | None) -> None:
        """One step; DeadlineExceeded when nothing moves for the deadline, CollectiveError otherwise."""
        out = into = None
        if send is not None:
            out = Outgoing(send[0], self._data[send[0]], call.header(len(send[1])), send[1])
            self.bytes_sent += len(send[1])
            self.header_bytes_sent += HEADER_BYTES
        if receive is not None:
            sink = receive[1]
            into = Incoming(receive[0], self._data[receive[0]], call.header(sink.nbytes), sink)
            self.bytes_received += sink.nbytes
            self.header_bytes_received += HEADER_BYTES
        idle_since = 0.0
        while out or into:
            moved = 0
            if out:
                moved = self._push(call, out)
                if out.left == 0:
                    out = None
            if into:
                moved += self._pull(call, into)
                if into.left == 0:
                    into = None
            if moved:
                if idle_since:
                    self.seconds_waiting += time.monotonic() - idle_since
                    idle_since = 0.0
            elif out or into:
                idle_since = idle_since or time.monotonic()
                self._wait(call, out, into, idle_since)
        if receive is not None:
            receive[1].finish()

    def wait_beside(self, call: Call, peer: int, bell: int, idle_since: float, arrived: Callable[[], bool]) -> None:
        """Sleep until the descriptor ``bell`` is readable or a peer says its last word; for shared memory.

        What is awaited of ``peer`` comes another way (``arrived``). All frames of earlier calls have been
        read, and ``peer`` does one thing after the other: a frame from it before that comes is of another call.
        """
        lane = self._data[peer]
        self._block(call, {bell: select.POLLIN, lane.fileno(): select.POLLIN}, peer, idle_since)
        try:
            header = lane.recv(HEADER_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(call, peer, error)
        if arrived():
            return
        if not header:
            self._lost(call, peer, None)
        if len(header) == HEADER_BYTES:
            self.mismatch(call, peer, header)

    def mismatch(self, call: Call, peer: int, header: bytes) -> NoReturn:
        """Fail: ``peer`` is in the call that ``header`` says."""
        theirs = describe_header(header)
        self._fail(
            call,
            NoticeKind.FAILED,
            peer,
            f"rank {self._rank} is in {call} but rank {peer} sent {theirs}",
            fix="All ranks must call the same collectives in the same order with the same sizes and types.",
        )

    def lost(self, call: Call, peer: int) -> NoReturn:
        """Fail: another connection to ``peer`` than those here ended. Its control lane says why."""
        if self.error is not None:
            raise self.error
        self._lost(call, peer, None)

    def stalled(self, call: Call, peer: int) -> NoReturn:
        """Fail: ``peer`` did not answer in time on another connection than those here."""
        if self.error is not None:
            raise self.error
        self._stalled(call, peer, min(_GRACE_S, self.deadline_s / 10))

    @property
    def address(self) -> str:
        """This host's address as a peer reaches it; one that other hosts reach, too, where there is one."""
        found = [str(sock.getsockname()[0]) for sock in self._data.values()]
        return next((it for it in found if not ipaddress.ip_address(it.split("%")[0]).is_loopback), found[0])

    def close(self, reason: str | None) -> None:
        """Tell the peers that this rank leaves (or fails with ``reason``) and wake a waiting thread."""
        if not self._closing:
            self._closing = True
            if self.error is None:
                failed = Notice(NoticeKind.FAILED, self._rank, f"rank {self._rank} failed: {reason}")
                self._control.tell(Notice(NoticeKind.LEFT, self._rank) if reason is None else failed)
            self._shut_data_lanes()

    def release(self) -> None:
        """Close the sockets; nobody may be in ``exchange``."""
        self._control.close()
        for sock in self._data.values():
            sock.close()

    def _push(self, call: Call, out: Outgoing) -> int:
        try:
            return out.push()
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lost(call, out.peer, error)

    def _pull(self, call: Call, into: Incoming) -> int:
        try:
            count = into.pull()
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lost(call, into.peer, error)
        except Unexpected as unexpected:
            self.mismatch(call, into.peer, unexpected.header)
        if count == 0:
            self._lost(call, into.peer, None)
        return count

    def _wait(self, call: Call, out: Outgoing | None, into: Incoming | None, idle_since: float) -> None:
        """Nothing moved: try again, or, after the spinning time, sleep."""
        if time.monotonic() - idle_since < self._spin_s:
            return
        waits: dict[int, int] = {}
        if out:
            waits[out.sock.fileno()] = select.POLLOUT
        if into:
            waits[into.sock.fileno()] = waits.get(into.sock.fileno(), 0) | select.POLLIN
        peer = into.peer if into else out.peer if out else self._rank
        self._block(call, waits, peer, idle_since)

    def _block(self, call: Call, waits: dict[int, int], peer: int, idle_since: float) -> None:
        """Sleep until something can move, a peer says its last word, or the deadline passes."""
        grace = min(_GRACE_S, self.deadline_s / 10)
        left = idle_since + self.deadline_s - grace - time.monotonic()
        if left > 0:
            _, news = self._control.wait(waits, left)
        else:
            news = []
            self._stalled(call, peer, grace)
        for other in news:
            notice = self._control.notices[other]
            if notice.kind is NoticeKind.STALLED:
                self._stalled(call, peer, grace)
            if notice.kind is NoticeKind.FAILED:
                self._fail(call, notice.kind, notice.culprit, notice.text, reported_by=other)
            # A rank that left in good order may have sent its last bytes before: reading on tells.

    def _lost(self, call: Call, peer: int, error: OSError | None) -> NoReturn:
        """The data lane to ``peer`` broke: its control lane says why."""
        if self._closing:
            self._fail(call, NoticeKind.FAILED, self._rank, f"rank {self._rank} closed its communicator")
        notice = self._control.last_word(peer, _GRACE_S)
        if notice is None:
            reason = f"rank {peer} was lost ({error or 'its data connection closed'})"
            self._fail(call, NoticeKind.FAILED, peer, reason)
        if notice.kind is NoticeKind.LEFT:
            self._fail(call, NoticeKind.FAILED, peer, f"rank {peer} closed its communicator")
        if notice.kind is NoticeKind.STALLED:
            self._stalled(call, peer, min(_GRACE_S, self.deadline_s / 10))
        self._fail(call, notice.kind, notice.culprit, notice.text, reported_by=peer)

    def _stalled(self, call: Call, peer: int, grace: float) -> NoReturn:
        """Nothing moved in time. Each rank tells whom it waits for; the silent end of the chain is it."""
        notices = self._control.notices
        began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=self.deadline_s - grace)
        waited = f"within {self.deadline_s:g} s, since {began:%H:%M:%S} UTC"
        text = f"rank {peer} did not answer {waited} in {call}"
        self._control.tell(Notice(NoticeKind.STALLED, peer, text))
        self._shut_data_lanes()
        others = set(self._data) - {peer}
        self._control.listen(others, grace)
        culprit, seen = peer, {self._rank}
        while culprit not in seen and (notice := notices.get(culprit)) is not None:
            if notice.kind is NoticeKind.FAILED:
                self._fail(call, notice.kind, notice.culprit, notice.text, reported_by=culprit, told=True)
            if notice.kind is NoticeKind.LEFT:
                break
            seen.add(culprit)
            culprit = notice.culprit
        if culprit == self._rank and len(seen) == 1:
            text = f"the other ranks gave up waiting for rank {culprit}"
        elif culprit in seen:
            text = f"the ranks wait for each other for {self.deadline_s:g} s; they called different collectives"
        else:
            text = f"rank {culprit} did not answer {waited}"
        self._fail(call, NoticeKind.STALLED, culprit, text, told=True)

    def _fail(
        self,
        call: Call,
        kind: NoticeKind,
        culprit: int,
        text: str,
        *,
        reported_by: int | None = None,
        told: bool = False,
        fix: str | None = None,
    ) -> NoReturn:
        """Break the communicator: remember the first error, tell every peer, raise."""
        if not told:
            self._control.tell(Notice(kind, culprit, text))
            self._shut_data_lanes()
        source = "" if reported_by in {None, culprit} else f" (reported by rank {reported_by})"
        error_type = DeadlineExceeded if kind is NoticeKind.STALLED else CollectiveError
        self.error = error_type(
            f"rank {self._rank} of {self._world_size}, {call}: {text}{source}.",
            fix=fix or f"See rank {culprit}'s own log; the run can go on from its last checkpoint.",
        )
        raise self.error

    def _shut_data_lanes(self) -> None:
        for sock in self._data.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
