"""Collectives among ranks of one host, through slots in shared memory.

A call is a number of rounds, each as large as a buffer. In a round of an allreduce every rank hands
in the pieces that others reduce, reduces its own piece of all, and takes the other results. The
three phases of successive rounds overlap, so a rank seldom waits for the very step that its peer
is in. Small arrays take one phase: all hand in everything, and all reduce everything in the same
order. Each element is combined in the order of ranks, by one rank or by all in the same way: the
results have the same bits everywhere.

A buffer is used again only when all ranks are done with it (``Word.DONE``). Waiting spins for a
moment, longer where ranks share cores; then the rank writes down whom it waits for and sleeps on
its pipe and on the TCP lanes, by which it hears of dead, failed and stalled peers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence

import numpy as np

from dl_on_spark.collectives.reduction import OPERATIONS, Array, finish
from dl_on_spark.collectives.schedule import block_bounds
from dl_on_spark.collectives.slot import BUFFER_BYTES, BUFFERS, Fence, Slot, Word
from dl_on_spark.collectives.tcp import SPIN_S, TcpBackend
from dl_on_spark.collectives.wire import HEADER_BYTES, Call

_CROWDED_SPIN_S = 1e-3  # with more ranks than cores, who gives its core away gives it to the rank that it waits for

DIRECT_BYTES = 64 * 1024
"""Up to this size (times two over the ranks of the host) all ranks reduce everything."""

_OCTET = np.dtype(np.uint8)


class SharedMemory:
    """This rank among the ``members`` (ascending) of its host; ``slots[i]`` is that of ``members[i]``.

    ``bell`` is the pipe end that this rank sleeps on, ``bells[i]`` the end that wakes ``members[i]``.

    ``values`` and ``octets`` are flat arrays, changed in place.
    """

    schedules = False

    def __init__(
        self, tcp: TcpBackend, rank: int, members: Sequence[int], slots: Sequence[Slot], bell: int, bells: Sequence[int]
    ) -> None:
        self.members = tuple(members)
        self.place = members.index(rank)
        self._tcp = tcp
        self._size = len(members)
        self._crowded = self._size > (os.cpu_count() or 1)
        self._slots = slots
        self._own = slots[self.place]
        self._words = [slot.words for slot in slots]
        self._all = range(self._size)
        self._others = [place for place in range(self._size) if place != self.place]
        self._bell = bell
        self._bells = bells
        self._fence = Fence()
        self._round = 0
        self._free_until = BUFFERS  # the last round whose buffers all ranks are known to have left

    def allreduce(self, call: Call, values: Array) -> None:
        """Combine ``values`` over all places."""
        self._reduce_to(call, values, self._all)

    def reduce(self, call: Call, values: Array) -> None:
        """The first place gets the result; elsewhere values become undefined."""
        self._reduce_to(call, values, (0,))

    def reduce_scatter(self, call: Call, values: Array) -> None:
        """This place's block (``block_bounds``) becomes the result, the rest is undefined."""
        self._reduce_to(call, values, ())

    def broadcast(self, call: Call, octets: Array) -> None:
        """The bytes of the rank ``call.root`` to all."""
        root = self.members.index(call.root)
        header = call.header(octets.size)
        for start in range(0, max(1, octets.size), BUFFER_BYTES):
            self._round += 1
            part = octets[start : start + BUFFER_BYTES]
            self._open(call, header, self._round)
            if self.place == root:
                self._put(self._own.buffer(self._round, _OCTET)[: part.size], part)
                self._publish(Word.FILLED, self._round)
            else:
                self._publish(Word.FILLED, self._round)
                self._await(call, Word.FILLED, self._round, [root])
                self._check(call, header, self._round, [root])
                self._get(part, self._slots[root].buffer(self._round, _OCTET)[: part.size])
            self._publish(Word.DONE, self._round)

    def allgather(self, call: Call, octets: Array, bounds: Sequence[int]) -> None:
        """Each place fills its block of ``octets`` and gets all others; blocks may differ in size."""
        header = call.header(octets.size)
        longest = max(bounds[place + 1] - bounds[place] for place in range(self._size))
        for turn in range(max(1, -(-longest // BUFFER_BYTES))):
            self._round += 1
            parts = self._pieces(octets, bounds, BUFFER_BYTES, turn)
            self._open(call, header, self._round)
            mine = parts[self.place]
            self._put(self._own.buffer(self._round, _OCTET)[: mine.size], mine)
            self._publish(Word.FILLED, self._round)
            self._await(call, Word.FILLED, self._round, self._others)
            self._check(call, header, self._round, self._others)
            for place in self._others:
                self._get(parts[place], self._slots[place].buffer(self._round, _OCTET)[: parts[place].size])
            self._publish(Word.DONE, self._round)

    def barrier(self, call: Call) -> None:
        """Return when every place has called."""
        self.allgather(call, np.empty(0, np.uint8), [0] * (self._size + 1))

    def close(self) -> None:
        """Unmap the slots and close the pipes; nobody is in a call."""
        for slot in self._slots:
            slot.close()
        for fd in (self._bell, *self._bells):
            os.close(fd)

    def _reduce_to(self, call: Call, values: Array, readers: Sequence[int]) -> None:
        """The whole result at the places in ``readers``, this place's block elsewhere."""
        reads = self.place in readers
        if readers and values.nbytes * self._size <= 2 * DIRECT_BYTES:
            self._reduce_everything(call, values, reads=reads)
            return
        bounds = block_bounds(values.size, self._size)
        piece = BUFFER_BYTES // self._size // 64 * 64 // values.itemsize
        first, rounds = self._round + 1, max(1, -(-bounds[1] // piece))
        header = call.header(values.nbytes)
        for turn in range(rounds + 2):
            if turn < rounds:
                self._hand_in(call, header, first + turn, self._pieces(values, bounds, piece, turn), piece)
            if 1 <= turn <= rounds:
                part = self._pieces(values, bounds, piece, turn - 1)[self.place]
                self._reduce(call, header, first + turn - 1, part, piece)
            if turn >= 2:
                parts = self._pieces(values, bounds, piece, turn - 2) if reads else []
                self._take(call, first + turn - 2, parts, piece)
        self._round += rounds

    @staticmethod
    def _pieces(values: Array, bounds: Sequence[int], piece: int, turn: int) -> list[Array]:
        """Of each block the elements that are due in this turn."""
        skip = turn * piece
        return [
            values[min(start + skip, stop) : min(start + skip + piece, stop)]
            for start, stop in itertools.pairwise(bounds)
        ]

    def _reduce_everything(self, call: Call, values: Array, *, reads: bool) -> None:
        header = call.header(values.nbytes)
        self._round += 1
        self._open(call, header, self._round)
        self._put(self._own.buffer(self._round, values.dtype)[: values.size], values)
        self._publish(Word.FILLED, self._round)
        self._await(call, Word.FILLED, self._round, self._others)
        self._check(call, header, self._round, self._others)
        if reads:
            inputs = [slot.buffer(self._round, values.dtype)[: values.size] for slot in self._slots]
            self._combine(inputs, values, call.op)
        self._publish(Word.DONE, self._round)

    def _hand_in(self, call: Call, header: bytes, round_: int, parts: list[Array], piece: int) -> None:
        self._open(call, header, round_)
        buffer = self._own.buffer(round_, parts[0].dtype)
        for place in self._others:
            self._put(buffer[place * piece : place * piece + parts[place].size], parts[place])
        self._publish(Word.FILLED, round_)

    def _reduce(self, call: Call, header: bytes, round_: int, part: Array, piece: int) -> None:
        self._await(call, Word.FILLED, round_, self._others)
        self._check(call, header, round_, self._others)
        start = self.place * piece
        inputs = [slot.buffer(round_, part.dtype)[start : start + part.size] for slot in self._slots]
        result, inputs[self.place] = inputs[self.place], part
        self._combine(inputs, result, call.op)
        self._publish(Word.REDUCED, round_)
        np.copyto(part, result)
        self._tcp.bytes_sent += part.nbytes

    def _take(self, call: Call, round_: int, parts: list[Array], piece: int) -> None:
        if parts:
            self._await(call, Word.REDUCED, round_, self._others)
            for place in self._others:
                buffer = self._slots[place].buffer(round_, parts[place].dtype)
                self._get(parts[place], buffer[place * piece : place * piece + parts[place].size])
        self._publish(Word.DONE, round_)

    def _combine(self, inputs: list[Array], result: Array, op: str) -> None:
        """In the order of places; ``result`` lies over none of the inputs."""
        combine = OPERATIONS[op]
        combine(inputs[0], inputs[1], out=result)
        for more in inputs[2:]:
            combine(result, more, out=result)
        finish(result, op, self._size)
        self._tcp.bytes_received += result.nbytes * (self._size - 1)

    def _put(self, buffer: Array, values: Array) -> None:
        np.copyto(buffer, values)
        self._tcp.bytes_sent += values.nbytes

    def _get(self, values: Array, buffer: Array) -> None:
        np.copyto(values, buffer)
        self._tcp.bytes_received += values.nbytes

    def _open(self, call: Call, header: bytes, round_: int) -> None:
        """Wait until nobody reads this round's buffer any more, and say what the round is for."""
        if round_ > self._free_until:
            self._await(call, Word.DONE, round_ - BUFFERS, self._others)
            self._free_until = BUFFERS + min(self._words[place][Word.DONE] for place in self._others)
        self._own.headers[round_ % BUFFERS][:] = header
        self._tcp.header_bytes_sent += HEADER_BYTES

    def _check(self, call: Call, header: bytes, round_: int, places: Sequence[int]) -> None:
        """All are in the same call, byte for byte of its header."""
        for place in places:
            theirs = self._slots[place].headers[round_ % BUFFERS].tobytes()
            if theirs != header:
                self._tcp.mismatch(call, self.members[place], theirs)
            self._tcp.header_bytes_received += HEADER_BYTES

    def _publish(self, word: Word, round_: int) -> None:
        """Tell that all stores before belong to this round, and wake who sleeps for this rank."""
        self._fence()
        self._own.words[word] = round_
        self._fence()
        for place in self._others:
            if self._words[place][Word.AWAITS] == self.place + 1:
                with contextlib.suppress(OSError):  # a full pipe wakes as well; a dead peer needs no waking
                    os.write(self._bells[place], b"!")

    def _await(self, call: Call, word: Word, round_: int, places: Sequence[int]) -> None:
        """Return when all of ``places`` have published; loads after it see what they stored before."""
        for place in places:
            if self._words[place][word] < round_:
                self._sleep(call, word, round_, place)
        self._fence()

    def _sleep(self, call: Call, word: Word, round_: int, place: int) -> None:
        words, since = self._words[place], time.monotonic()
        until = since + (_CROWDED_SPIN_S if self._crowded else SPIN_S)
        while words[word] < round_ and time.monotonic() < until:
            if self._crowded:
                os.sched_yield()
        try:
            while words[word] < round_:
                self._own.words[Word.AWAITS] = place + 1
                self._fence()
                if words[word] < round_:
                    self._tcp.wait_beside(call, self.members[place], self._bell, since, lambda: words[word] >= round_)
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._bell, 4096)
        finally:
            self._own.words[Word.AWAITS] = 0
        self._tcp.seconds_waiting += time.monotonic() - since
