"""The worker's end of the channel to the driver.

``send`` only puts into a bounded queue; a thread connects, sends, repeats the heartbeat every second
and connects again when the connection breaks. Training never waits for the driver and never fails
because of it: if the driver cannot be reached, the worker's log says so and the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from dl_on_spark.launch.frames import FrameError, encode, greet_driver, read_frame

_HEARTBEAT_S = 1.0
_CONNECT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
_RETRY_S = 2.0
_QUEUE_LIMIT = 10_000
_END = encode({"kind": "bye"})


class WorkerChannel:
    """Messages of one worker to the driver; thread safe.

    ``on_stop`` is called (in another thread) when the driver asks this worker to end, ``on_hang``
    with the main thread's stack when there was no progress for `deadline_s` and no driver to see it.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        rank: int,
        host: str,
        deadline_s: float,
        on_stop: Callable[[], None],
        on_hang: Callable[[str], None],
    ) -> None:
        driver, _, port = address.rpartition(":")
        self._address = (driver, int(port))
        self._secret = secret
        self._identity = {"role": "worker", "rank": rank, "host": host, "pid": os.getpid()}
        self._deadline_s = deadline_s
        self._on_stop = on_stop
        self._on_hang = on_hang
        self._queue: queue.Queue[bytes] = queue.Queue(_QUEUE_LIMIT)
        self._link: socket.socket | None = None
        self._unsent: bytes | None = None
        self._next_attempt = 0.0
        self._warned = False
        self._sequence = 0
        self._order = threading.Lock()
        self._step: int | None = None
        self._ticks = 0
        self._dropped = 0
        self._closing = threading.Event()
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int | None:
        """The last step said by :meth:`progress` or a message with a ``step``."""
        return self._step

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queue a message; dropped (and counted) when the queue is full. Counts as progress.

        The fields are read before this returns: the caller may change them at once.
        """
        if isinstance(fields.get("step"), int):
            self._step = fields["step"]
        self._ticks += 1
        with self._order:  # the queue's order is that of the numbers
            self._sequence += 1
            try:
                self._queue.put_nowait(encode({**fields, "kind": kind, "sequence": self._sequence}))
            except queue.Full:
                self._dropped += 1
            except FrameError as error:
                self._dropped += 1
                self._say(f"dropped a message of kind {kind!r}: {error}")

    def progress(self, step: int | None = None) -> None:
        """Say that this worker is alive and at `step`: no message, the next heartbeat carries it."""
        if step is not None:
            self._step = step
        self._ticks += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued and say good-bye, for at most `timeout_s`."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(_END)
        self._thread.join(timeout_s)
        self._disconnect()

    def _run(self) -> None:
        next_heartbeat = 0.0
        progressed, last = time.monotonic(), (self._step, self._ticks)
        while True:
            now = time.monotonic()
            if (current := (self._step, self._ticks)) != last:
                progressed, last = now, current
            if self._link is None and now >= self._next_attempt:
                self._connect()
            if self._link is None:
                if self._closing.is_set():
                    return
                if now - progressed > self._deadline_s:
                    self._on_hang(self._main_stack())
                self._closing.wait(0.2)
                continue
            if now >= next_heartbeat:
                state = {"step": self._step, "ticks": self._ticks, "dropped": self._dropped}
                self._write(encode({"kind": "heartbeat", **state}))
                next_heartbeat = now + _HEARTBEAT_S
            try:
                frame = self._queue.get(timeout=max(0.0, next_heartbeat - time.monotonic()))
            except queue.Empty:
                continue
            self._write(frame)
            if frame is _END:
                return

    def _connect(self) -> None:
        try:
            link = socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S)
            greet_driver(link, self._secret, self._identity)
        except (OSError, FrameError) as error:
            self._next_attempt = time.monotonic() + _RETRY_S
            if not self._warned:
                self._warned = True
                place = f"{self._address[0]}:{self._address[1]}"
                self._say(f"cannot reach the driver at {place} ({error}); the run goes on unseen.")
            return
        link.settimeout(_SEND_TIMEOUT_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link = link
        threading.Thread(target=self._listen, args=(link,), name="channel-listen", daemon=True).start()
        if self._unsent is not None:
            unsent, self._unsent = self._unsent, None
            self._write(unsent)

    def _listen(self, link: socket.socket) -> None:
        """Obey the driver until the connection ends."""

        def read(size: int) -> bytes:
            while True:
                try:
                    return link.recv(size)
                except TimeoutError:
                    continue  # the driver is silent for most of a run

        try:
            while (order := read_frame(read)) is not None:
                if order.get("kind") == "stop":
                    self._on_stop()
                elif order.get("kind") == "where":
                    with contextlib.suppress(queue.Full):
                        self._queue.put_nowait(encode({"kind": "stack", "stack": self._main_stack()}))
        except (OSError, FrameError):
            pass  # the sender notices too and connects again

    def _write(self, frame: bytes) -> None:
        link = self._link
        if link is None:
            self._unsent = frame
            return
        try:
            link.sendall(frame)
        except OSError:
            self._unsent = frame
            self._disconnect()

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _main_stack(self) -> str:
        frame = sys._current_frames().get(self._main_thread or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _say(self, text: str) -> None:
        sys.stderr.write(f"dl_on_spark worker {self._identity['rank']}: {text}\n")
        sys.stderr.flush()


def report_once(address: str, secret: bytes, rank: int, message: dict[str, Any]) -> bool:
    """One message to the driver on a connection of its own; False when it cannot be reached."""
    driver, _, port = address.rpartition(":")
    try:
        with socket.create_connection((driver, int(port)), timeout=_CONNECT_TIMEOUT_S) as link:
            greet_driver(link, secret, {"role": "task", "rank": rank})
            link.sendall(encode(message) + _END)
    except (OSError, FrameError):
        return False
    return True
