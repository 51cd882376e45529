"""Start the workers, listen to them, and end with their results or with the first cause.

The driver hears each worker over its channel (:mod:`dl_on_spark.launch.driver_channel`) and each
barrier task over Spark. A failed barrier stage is never retried by Spark: who wants another attempt
calls :func:`launch` again with ``attempt + 1``.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import Cancelled, WorkerFailed
from dl_on_spark.lake.spark_session import spark_context
from dl_on_spark.launch.barrier import (
    BarrierJob,
    is_cancelled,
    is_loopback,
    on_this_machine,
    plain_cause,
    setting,
    worker_profile,
)
from dl_on_spark.launch.driver_channel import ChannelServer
from dl_on_spark.launch.failure import Cause, Failure, first_cause, to_error
from dl_on_spark.launch.gpus import local_gpus
from dl_on_spark.launch.request import LaunchRequest, Message
from dl_on_spark.launch.worker_process import TaskSpec, run_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_START_DEADLINE_S = 120.0
_POLL_S = 0.25
# How long others may add their view after a worker told its own cause, or only the echo of one.
_GRACE_S = 0.5
_ECHO_GRACE_S = 5.0
# A closed connection comes back within seconds unless the worker is dead, and then its task says so.
_RECONNECT_GRACE_S = 10.0
# Workers that wait in an exchange say at the deadline for whom, and in which operation: that comes first.
_VERDICT_S = 2.0
_STACK_WAIT_S = 2.0
_STOP_S = 3.0
_CANCEL_S = 10.0
_DRAIN_S = 2.0


def launch(spark: SparkSession, request: LaunchRequest, on_message: Callable[[Message], None]) -> list[dict[str, Any]]:
    """Run ``request.entry`` in ``request.num_workers`` processes on the cluster; results by rank.

    `on_message` gets the workers' messages in the caller's thread. Returns when every worker has
    ended. Raises :class:`WorkerFailed` with the first cause, the :class:`InputError` a worker raised,
    or :class:`Cancelled` after Ctrl-C, SIGTERM or a cancellation through Spark; no process of the run is left
    in any case.
    """
    inbox: SimpleQueue[Message] = SimpleQueue()
    secret = secrets.token_bytes(32)
    bind_host, host = driver_hosts(spark)
    with terminate_as_interrupt(), ChannelServer(secret, inbox, bind_host=bind_host, host=host) as server:
        local = on_this_machine(spark)
        spec = TaskSpec(
            request=request,
            secret=secret,
            driver_address=server.address,
            local=local,
            local_gpus=tuple(local_gpus()) if local and request.gpus_per_worker else (),
            driver_path=tuple(sys.path) if local else (),
        )
        job = BarrierJob(
            spark,
            lambda: run_worker(spec),
            request.num_workers,
            profile=worker_profile(spark, request.gpus_per_worker, request.cpus_per_worker),
            name=f"dl_on_spark: {request.num_workers} workers, attempt {request.attempt}",
            on_end=lambda: inbox.put(Message(-1, "job_end", {}, time.time())),
        )
        run = _Run(request, server, job, inbox, on_message)
        try:
            job.start()
            return run.results()
        except KeyboardInterrupt:
            raise Cancelled(
                "stopped by the user or the scheduler.", fix="Run the same command again to resume."
            ) from None
        finally:
            _end(request, server, job)


def driver_hosts(spark: SparkSession) -> tuple[str, str]:
    """(the interface to listen on, the name by which executors reach this program).

    Under Spark Connect the settings name the server's host: this program's is the address from which it
    reaches the server.
    """
    if on_this_machine(spark):
        return "127.0.0.1", "127.0.0.1"
    if spark_context(spark) is None:
        server = spark.client.host
        return "", socket.gethostname() if is_loopback(server) else _address_towards(server)
    host = setting(spark, "spark.driver.host", socket.gethostname())
    return setting(spark, "spark.driver.bindAddress", ""), host


def _address_towards(host: str) -> str:
    """The address of this machine in what it sends to `host`; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as out:
        out.connect(place)
        return str(out.getsockname()[0])


@dataclass
class _Worker:
    """What the driver knows of one rank; times are of the monotonic clock."""

    host: str = "an executor"
    heard: float | None = None
    progressed: float = 0.0
    lost: float | None = None
    step: int | None = None
    ticks: int = -1
    stack: str | None = None
    finished: bool = False


class _Run:
    """One launch, from the first task's start to the results or the first cause."""

    def __init__(
        self,
        request: LaunchRequest,
        server: ChannelServer,
        job: BarrierJob,
        inbox: SimpleQueue[Message],
        on_message: Callable[[Message], None],
    ) -> None:
        self._request = request
        self._server = server
        self._job = job
        self._inbox = inbox
        self._on_message = on_message
        self._workers = [_Worker() for _ in range(request.num_workers)]
        self._failures: dict[int, Failure] = {}
        self._first_failure = 0.0
        self._started = time.monotonic()
        self._warned_unseen = False

    def results(self) -> list[dict[str, Any]]:
        """Listen until the job ends or a worker fails."""
        while True:
            message = self._next(_POLL_S)
            if message is not None and message.kind == "job_end":
                return self._conclude()
            self._judge(time.monotonic())

    def _next(self, timeout_s: float) -> Message | None:
        """Take in one message; None when none came."""
        try:
            message = self._inbox.get(timeout=timeout_s)
        except Empty:
            return None
        if 0 <= message.rank < len(self._workers):
            self._hear(message)
        return message

    def _hear(self, message: Message) -> None:
        worker, now = self._workers[message.rank], time.monotonic()
        fields = message.fields
        if message.kind == "lost":
            worker.lost = now
            return
        if message.kind == "failed":
            self._fail(Failure.from_dict(fields))
            return
        if worker.heard is None:
            worker.progressed = now
        worker.heard = now
        if message.kind == "hello":
            worker.host, worker.lost = str(fields.get("host", worker.host)), None
        elif message.kind == "bye":
            worker.finished = True
        elif message.kind == "stack":
            worker.stack = str(fields.get("stack", ""))
        elif message.kind == "heartbeat":
            progress = (fields.get("step"), fields.get("ticks", 0))
            if progress != (worker.step, worker.ticks):
                worker.progressed = now
            worker.step, worker.ticks = progress
        else:
            worker.progressed = now
            if isinstance(fields.get("step"), int):
                worker.step = fields["step"]
            self._on_message(message)

    def _fail(self, failure: Failure) -> None:
        """Keep the first failure of each rank; a task repeats what its worker said itself."""
        if failure.rank in self._failures:
            return
        if failure.step is None:
            failure = replace(failure, step=self._workers[failure.rank].step)
        if not self._failures:
            self._first_failure = time.monotonic()
        self._failures[failure.rank] = failure

    def _judge(self, now: float) -> None:
        """Raise when the run has failed: by a known cause, or by silence."""
        if self._failures:
            first = first_cause(self._failures.values())
            echo = first.cause is Cause.EXCHANGE
            known_all = len(self._failures) == len(self._workers)
            grace_s = _ECHO_GRACE_S if echo or first.diverged else _GRACE_S
            if known_all or now - self._first_failure > grace_s:
                if echo and not known_all:
                    self._blame_silent()
                self._raise()
            return
        for rank, worker in enumerate(self._workers):
            if worker.lost is not None and now - worker.lost > _RECONNECT_GRACE_S:
                self._fail(self._lost(rank))
        deadline = self._request.deadline_s
        late = [
            rank
            for rank, worker in enumerate(self._workers)
            if not worker.finished
            and worker.heard is not None
            and now - min(worker.heard, worker.progressed) > deadline + _VERDICT_S
        ]
        if late and not self._failures:
            self._blame_late(late)
        if self._failures:
            self._raise()
        self._check_start(now)

    def _check_start(self, now: float) -> None:
        """Every worker reports within the start's deadline, or runs where the driver cannot hear it."""
        unseen = [rank for rank, worker in enumerate(self._workers) if worker.heard is None]
        if not unseen or self._warned_unseen:
            return
        waited = now - self._started
        if waited <= min(_START_DEADLINE_S, self._request.deadline_s):
            return
        if len(unseen) == len(self._workers) and self._job.active_tasks() in (0, None):
            raise WorkerFailed(
                f"no worker has started after {waited:.0f} s: "
                f"the cluster has no {len(self._workers)} free slots at once.",
                fix="Ask for fewer workers, or end the other jobs of this application.",
            )
        self._warned_unseen = True
        text = f"workers {unseen} cannot reach the driver at {self._server.address}: they run on unseen."
        for rank in unseen:
            self._on_message(Message(rank, "log", {"text": text}, time.time()))
        logger.warning("%s", text)

    def _blame_late(self, late: list[int]) -> None:
        """Name the workers without progress; those who wait for a peer in an exchange are its victims."""
        self._ask_stacks(late)
        for rank in late:
            worker = self._workers[rank]
            stack = worker.stack
            waits = stack is not None and "dl_on_spark/collectives/" in stack
            silent = worker.heard is None or worker.heard < worker.progressed + 0.5 * self._request.deadline_s
            what = "silent" if silent else "no progress"
            self._fail(
                Failure(
                    rank=rank,
                    host=worker.host,
                    cause=Cause.EXCHANGE if waits else Cause.HUNG,
                    message=f"{what} for {self._request.deadline_s:g} s (deadline_s)"
                    + (", waiting for a peer" if waits else ""),
                    traceback=f"worker {rank} was at:\n{stack}" if stack else None,
                    fix="If a step or a validation takes this long, raise deadline_s.",
                )
            )

    def _blame_silent(self) -> None:
        """Exchanges failed, and some workers said nothing: these are what the others waited for."""
        silent = [rank for rank in range(len(self._workers)) if rank not in self._failures]
        self._ask_stacks(silent)
        for rank in silent:
            worker = self._workers[rank]
            if worker.heard is None and worker.lost is None:
                continue
            stack = worker.stack
            if stack is not None and "dl_on_spark/collectives/" in stack:
                continue
            idle = time.monotonic() - worker.progressed
            self._fail(
                Failure(
                    rank=rank,
                    host=worker.host,
                    cause=Cause.HUNG if worker.lost is None else Cause.LOST,
                    message=f"no progress for {idle:.0f} s while its peers waited for it",
                    traceback=f"worker {rank} was at:\n{stack}" if stack else None,
                )
            )

    def _ask_stacks(self, ranks: list[int]) -> None:
        """Ask the workers where they are; those that cannot answer in time stay without."""
        asked = [rank for rank in ranks if self._server.send(rank, "where")]
        until = time.monotonic() + _STACK_WAIT_S
        while any(self._workers[rank].stack is None for rank in asked) and time.monotonic() < until:
            self._next(0.1)

    def _lost(self, rank: int) -> Failure:
        worker = self._workers[rank]
        return Failure(
            rank, worker.host, Cause.LOST, "its connection ended and its task says nothing", step=worker.step
        )

    def _conclude(self) -> list[dict[str, Any]]:
        """The job has ended: take in the last messages, then judge by the tasks' own outcomes."""
        self._drain()
        if self._job.error is not None:
            headline, traceback = plain_cause(self._job.error)
            if is_cancelled(self._job.error):
                raise Cancelled(
                    f"Spark cancelled the workers' job: {headline}", fix="Run the same command again to resume."
                ) from None
            for rank, worker in enumerate(self._workers):
                if worker.lost is not None and rank not in self._failures:
                    self._fail(replace(self._lost(rank), message=f"its task is gone: {headline}"))
            if self._failures:
                self._raise()
            raise WorkerFailed(f"Spark ended the workers: {headline}", traceback=traceback) from None
        outcomes = self._job.outcomes or []
        for outcome in outcomes:
            if not outcome["ok"]:
                self._fail(Failure.from_dict(outcome["failure"]))
        if self._failures:
            self._raise()
        return [outcome["result"] for outcome in outcomes]

    def _drain(self) -> None:
        until = time.monotonic() + _DRAIN_S
        while time.monotonic() < until:
            connected = self._server.connected
            if self._next(0.02) is None and not connected:
                return

    def _raise(self) -> None:
        failures = list(self._failures.values())
        raise to_error(first_cause(failures), failures) from None


def _end(request: LaunchRequest, server: ChannelServer, job: BarrierJob) -> None:
    """Leave nothing behind: ask the workers to stop, then Spark, and wait for both.

    A job that ended may have left workers: when one executor is lost, Spark kills the other tasks of
    the stage in its own time.
    """
    for rank in range(request.num_workers):
        server.send(rank, "stop")
    if not job.join(_STOP_S if server.connected else 0.0):
        job.cancel()
        if not job.join(_CANCEL_S):
            logger.warning("Spark has not ended the workers' job %s in %g s.", job.tag, _CANCEL_S)
    until = time.monotonic() + _CANCEL_S
    while server.connected and time.monotonic() < until:
        time.sleep(0.02)  # a worker's connection closes when its process ends


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """While the workers run, SIGTERM ends this program the way Ctrl-C does, where nobody handles it."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
