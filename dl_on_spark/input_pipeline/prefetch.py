"""Windows are decoded ahead of need, by a few threads, with a bound on how many are held."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

import pyarrow as pa

from dl_on_spark.errors import DLOnSparkError
from dl_on_spark.input_pipeline.windows import Window

_NICE = 10  # a tenth of the weight of the step loop, and of its neighbours on the host

Loaded = TypeVar("Loaded")
_Job = tuple["Future[Loaded]", Callable[[], Loaded]]


class DecodePool:
    """A few daemon threads that run jobs in order of submission.

    They run at a lower priority than the process's other threads (Linux gives each thread its own): rows are read
    ahead in the time that the step loop leaves, and when it wakes from an exchange that other workers wait in, it
    does not have to wait for a core.

    Not `concurrent.futures.ThreadPoolExecutor`: the interpreter waits without end for its threads
    at exit, so one read that hangs would keep a failed worker alive.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: SimpleQueue[_Job[object] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=_run_jobs, args=(self._jobs,), name=f"row-group-decoder-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], Loaded]) -> Future[Loaded]:
        """Queue a job; its result or its exception (with traceback) comes from the future."""
        if self._closed:
            raise DLOnSparkError("The reader is closed.", fix="Open a new RankReader to read on.")
        future: Future[Loaded] = Future()
        self._jobs.put((future, job))  # type: ignore[arg-type]
        return future

    def close(self, deadline_s: float) -> None:
        """Drop waiting jobs and join the threads. A job that hangs is left behind at the deadline."""
        if self._closed:
            return
        self._closed = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


class SharedRowGroups:
    """Decoded row groups, each kept for as long as a queued window needs it.

    Windows of several streams may cut the same row group; those queued at the same time share one
    decoding. ``acquire`` when a window is queued, ``release`` when it is done or dropped.
    """

    def __init__(self, decode: Callable[[int], pa.Table]) -> None:
        self._decode = decode
        self._lock = threading.Lock()
        self._held: dict[int, _SharedGroup] = {}

    def acquire(self, groups: Sequence[int]) -> None:
        """Announce one more use of each of the groups."""
        with self._lock:
            for group in groups:
                self._held.setdefault(group, _SharedGroup()).users += 1

    def table(self, group: int) -> pa.Table:
        """The rows of an acquired group: decoded by the first caller, shared by the others."""
        shared = self._held[group]
        with shared.lock:
            if shared.table is None:
                shared.table = self._decode(group)
            return shared.table

    def release(self, groups: Sequence[int]) -> None:
        """End one use of each of the groups; the last use drops the decoded rows."""
        with self._lock:
            for group in groups:
                shared = self._held[group]
                shared.users -= 1
                if shared.users == 0:
                    del self._held[group]


class _SharedGroup:
    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.Lock()
        self.table: pa.Table | None = None


class WindowPrefetcher(Generic[Loaded]):
    """Loads ``windows``, given in order of need, at most ``lookahead`` ahead of the consumer.

    ``load(window, groups)`` runs in the pool. Held at any time: the windows the consumer has
    taken, ``lookahead`` more, and the row groups these are cut from while they load.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        pool: DecodePool,
        groups: SharedRowGroups,
        load: Callable[[Window, SharedRowGroups], Loaded],
        *,
        lookahead: int,
        deadline_s: float,
    ) -> None:
        self._waiting = deque(windows)
        self._queued: dict[tuple[int, int], tuple[Window, Future[Loaded]]] = {}
        self._pool, self._groups, self._load = pool, groups, load
        self._lookahead, self._deadline_s = lookahead, deadline_s

    def __enter__(self) -> WindowPrefetcher[Loaded]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._waiting.clear()
        for window, future in self._queued.values():
            if future.cancel():
                self._groups.release(_groups_of(window))
        self._queued.clear()

    def queue(self, count: int) -> None:
        """Have at least ``count`` windows queued or loaded but not taken."""
        while self._waiting and len(self._queued) < count:
            self._queue_next()

    def take(self, window: Window) -> Loaded:
        """The loaded window; waits for it at most ``deadline_s``.

        Raises what ``load`` raised, with its traceback, or an error that names the window's row
        groups when the deadline passes.
        """
        key = (window.stream, window.index)
        while key not in self._queued:
            self._queue_next()
        _, future = self._queued.pop(key)
        self.queue(self._lookahead)
        try:
            return future.result(timeout=self._deadline_s)
        except FutureTimeout:
            if future.done():
                raise
            raise DLOnSparkError(
                f"Row groups {_groups_of(window)[:8]} of the snapshot were not read within {self._deadline_s:g} s.",
                fix="Check that the table's storage answers, or raise deadline_s.",
            ) from None

    def _queue_next(self) -> None:
        window = self._waiting.popleft()
        groups = _groups_of(window)
        self._groups.acquire(groups)

        def load() -> Loaded:
            try:
                return self._load(window, self._groups)
            finally:
                self._groups.release(groups)

        self._queued[window.stream, window.index] = window, self._pool.submit(load)


def _groups_of(window: Window) -> list[int]:
    return [segment.group for segment in window.segments]


def _run_jobs(jobs: SimpleQueue[_Job[object] | None]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    while (item := jobs.get()) is not None:
        future, job = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        # A thread that waits for its next job must not keep the last one's arrays alive.
        del item, future, job
