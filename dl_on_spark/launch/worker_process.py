"""What a barrier task does: start the trainer in a process of its own, introduce it, watch it.

Runs in Spark's Python worker, which is reused by later jobs: its environment and working state stay
as they are. The child gets a clean copy, the devices and cores of its task, and dies with us.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dl_on_spark.launch.failure import Cause, Failure, of_exception, of_exit
from dl_on_spark.launch.frames import FrameError, read_frame, read_pipe, write_pipe
from dl_on_spark.launch.gpus import share_of_rank, visible_devices
from dl_on_spark.launch.request import LaunchRequest
from dl_on_spark.launch.worker_channel import report_once

_ADDRESS_DEADLINE_S = 60.0
_REAP_S = 10.0
# What TensorFlow says on every start, before its own log level applies; the last on machines without a GPU.
_START_UP_NOISE = re.compile(
    r"I0000 00:00:|WARNING: All log messages before absl::InitializeLog|E0000 00:00:.*failed call to cuInit"
)
_TAIL_LINES = 40
# What Spark gives its Python workers to talk to their JVM is none of the trainer's business.
_SPARK_PRIVATE = ("PYTHON_WORKER_FACTORY_", "PYSPARK_GATEWAY_", "SPARK_REUSE_WORKER", "_PYSPARK_DRIVER_")


@dataclass(frozen=True)
class TaskSpec:
    """What travels from the driver inside the barrier task."""

    request: LaunchRequest
    secret: bytes = field(repr=False)
    driver_address: str
    local: bool
    local_gpus: tuple[str, ...] = ()
    driver_path: tuple[str, ...] = ()


def run_worker(spec: TaskSpec) -> dict[str, Any]:
    """The work of one barrier task; its outcome as plain values, with ``rank`` in it.

    Never raises for a worker's failure: a failed task would make Spark kill the others before they
    could say what they saw. Every task takes part in the one allGather, whatever happened to it.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    rank = context.partitionId()
    host = _own_host(context, rank, spec.local)
    worker = None
    said: dict[str, Any]
    try:
        worker = _Worker(spec, rank, host, _cpus(context, spec.request), _gpus(context, spec, rank))
        said = {"address": worker.address}
    except _Died as death:
        said = {"failure": death.failure.to_dict()}
    except Exception as error:
        said = {"failure": of_exception(error, rank=rank, host=host, step=None).to_dict()}
    try:
        heard = [json.loads(text) for text in context.allGather(json.dumps(said))]
        if all("address" in one for one in heard) and worker is not None:
            outcome = worker.watch([one["address"] for one in heard])
        elif "failure" in said:
            outcome = {"ok": False, "failure": said["failure"]}
        else:
            stopped = Failure(rank, host, Cause.STOPPED, "stopped: another worker could not start")
            outcome = {"ok": False, "failure": stopped.to_dict()}
    finally:
        if worker is not None:
            worker.end()
    failure = outcome.get("failure")
    if failure is not None and failure["cause"] != Cause.STOPPED:
        report_once(spec.driver_address, spec.secret, rank, {"kind": "failed", **failure})
    return {"rank": rank, **outcome}


class _Died(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Worker:
    """The child process, from its start to its address, its outcome and its end."""

    def __init__(self, spec: TaskSpec, rank: int, host: str, cpus: int, gpus: list[str]) -> None:
        self.rank = rank
        self.host = host
        self._step: int | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        # TensorFlow removes its temporary files at a regular exit only, which a worker never has.
        self._scratch = tempfile.mkdtemp(prefix="dl_on_spark-", dir=_scratch_root())
        self._report, report = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dl_on_spark.launch.child", str(report)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(report,),
                env={**child_environment(spec, cpus, gpus), "TMPDIR": self._scratch},
                # A group of its own: Ctrl-C in a terminal reaches the driver, not the trainers, and
                # whatever the trainer starts can be ended with it.
                process_group=0,
            )
        finally:
            os.close(report)
        self._reader = threading.Thread(target=self._forward, name="worker-output", daemon=True)
        self._reader.start()
        job = {
            "rank": rank,
            "host": host,
            "bind_host": _bindable(host, spec.local),
            "parent_pid": os.getpid(),
            "scratch": self._scratch,
            "secret": spec.secret.hex(),
            "driver_address": spec.driver_address,
            "entry": spec.request.entry,
            "payload": base64.b64encode(spec.request.payload).decode(),
            "attempt": spec.request.attempt,
            "deadline_s": spec.request.deadline_s,
            "cpus": cpus,
            "gpus": gpus,
        }
        try:
            self._order(job)
            first = self._next_report(time.monotonic() + _ADDRESS_DEADLINE_S)
            if first is None or first.get("kind") != "address":
                raise _Died(self._death())
        except BaseException:
            self.end()
            raise
        self.address = str(first["address"])

    def watch(self, peers: list[str]) -> dict[str, Any]:
        """Give the child its peers and wait for its outcome, or its death.

        Without a deadline of its own: the driver judges progress, and the child judges itself when
        no driver listens.
        """
        self._order({"peers": peers})
        outcome = self._next_report(None)
        if outcome is None or outcome.get("kind") != "outcome":
            return {"ok": False, "failure": self._death().to_dict()}
        outcome.pop("kind")
        return outcome

    def end(self) -> None:
        """Kill what is left of the child and of what it started, and reap it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # after its outcome it has only to exit
        with contextlib.suppress(OSError):  # nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_REAP_S)
        self._reader.join(_REAP_S)
        shutil.rmtree(self._scratch, ignore_errors=True)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def _order(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: its report says so
            write_pipe(self._process.stdin.fileno(), message)

    def _next_report(self, deadline: float | None) -> dict[str, Any] | None:
        """The child's next frame; None when it ended, or at `deadline`."""
        while True:
            if select.select([self._report], [], [], 0.2)[0]:
                try:
                    return read_frame(read_pipe(self._report), 1 << 30)
                except FrameError:
                    return None  # killed while it wrote
            if self._process.poll() is not None and not select.select([self._report], [], [], 0)[0]:
                return None
            if deadline is not None and time.monotonic() > deadline:
                return None

    def _death(self) -> Failure:
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return Failure(self.rank, self.host, Cause.HUNG, f"the process did not start in {_ADDRESS_DEADLINE_S:g} s")
        self._reader.join(1.0)
        return of_exit(code, "".join(self._tail), rank=self.rank, host=self.host, step=None)

    def _forward(self) -> None:
        """Copy the child's output to the executor's log and keep its last lines."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while line := self._process.stdout.readline(8192):
                text = line.decode(errors="replace")
                if _START_UP_NOISE.match(text):
                    continue
                self._tail.append(text)
                sys.stderr.write(text)
                sys.stderr.flush()


def _scratch_root() -> str | None:
    """A folder that Spark removes when the executor is gone, even if this task is killed; None without one."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return folder if folder and Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK) else None


def child_environment(spec: TaskSpec, cpus: int, gpus: list[str]) -> dict[str, str]:
    """A copy of the task's environment with the worker's devices, threads and module path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_SPARK_PRIVATE)}
    environment["PYTHONPATH"] = os.pathsep.join(_module_path(spec))
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        environment[variable] = str(cpus)
    environment.update(visible_devices(gpus))
    environment.update(spec.request.env)
    return environment


def _module_path(spec: TaskSpec) -> list[str]:
    """Where the task finds modules (archives of --py-files too), less what any interpreter has.

    On a local master also where the driver's program finds its own, for a model beside it.
    """
    builtin = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    builtin.add(os.path.join(os.path.realpath(sysconfig.get_paths()["stdlib"]), "lib-dynload"))  # noqa: PTH118
    paths = dict.fromkeys(path for path in (*sys.path, *spec.driver_path) if path)
    return [path for path in paths if os.path.realpath(path) not in builtin]


def _cpus(context: Any, request: LaunchRequest) -> int:
    return request.cpus_per_worker or max(1, int(context.cpus()))


def _gpus(context: Any, spec: TaskSpec, rank: int) -> list[str]:
    resource = context.resources().get("gpu")
    if resource is not None:
        return [str(address) for address in resource.addresses]
    if spec.local and spec.request.gpus_per_worker:
        return share_of_rank(spec.local_gpus, rank, spec.request.gpus_per_worker)
    return []


def _own_host(context: Any, rank: int, local: bool) -> str:
    if local:
        return "127.0.0.1"
    address: str = context.getTaskInfos()[rank].address
    host = address.rpartition(":")[0] if address.rpartition(":")[2].isdigit() else address
    return host.strip("[]") or socket.gethostname()


def _bindable(host: str, local: bool) -> str:
    """The address of the interface that the executor itself uses, as peers will dial it."""
    if local:
        return "127.0.0.1"
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
