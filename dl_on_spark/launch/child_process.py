"""The trainer's process as its task sees it: started clean, heard over a pipe, ended with all it started.

Runs in Spark's Python worker, which is reused by later jobs: its environment and working state stay
as they are. The child gets a clean copy, the devices and cores of its task, and dies with us.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dl_on_spark.launch.failure import Cause, Failure, of_exit
from dl_on_spark.launch.frames import FrameError, read_frame, read_pipe, write_pipe
from dl_on_spark.launch.gpus import visible_devices

_REAP_S = 10.0
_STACK_S = 0.3
# What TensorFlow says on every start, before its own log level applies; the last on machines without a GPU.
_START_UP_NOISE = re.compile(
    r"I0000 00:00:|WARNING: All log messages before absl::InitializeLog|E0000 00:00:.*failed call to cuInit"
)
_TAIL_LINES = 40
# What Spark gives its Python workers to talk to their JVM is none of the trainer's business.
_SPARK_PRIVATE = ("PYTHON_WORKER_FACTORY_", "PYSPARK_GATEWAY_", "SPARK_REUSE_WORKER", "_PYSPARK_DRIVER_")
SCRATCH_PREFIX = "dl_on_spark-"


class ChildProcess:
    """``python -m MODULE <descriptor>``: orders go to its standard input, what it reports comes from the descriptor."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        # TensorFlow removes its temporary files at a regular exit only, which a worker never has.
        self._scratch = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=_scratch_root())
        self._report, report = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(report)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(report,),
                env={**environment, "TMPDIR": self._scratch},
                # A group of its own: Ctrl-C in a terminal reaches the driver, not the trainers, and
                # whatever the trainer starts can be ended with it.
                process_group=0,
            )
        finally:
            os.close(report)
        self._reader = threading.Thread(target=self._forward, name="worker-output", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

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

    def reap(self) -> None:
        """Wait, in a thread, until the process ends, then leave nothing behind of what it started or wrote.

        Its last report can still be read.
        """
        self._process.wait()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def order(self, message: dict[str, Any]) -> None:
        """Send a frame; a child that died cannot hear it, and its report says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            write_pipe(self._process.stdin.fileno(), message)

    def next_report(self, deadline: float | None) -> dict[str, Any] | None:
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

    def death(self, rank: int, host: str, still_there: str) -> Failure:
        """Why it ended before its work was done; ``still_there``: what it did wrong if it has not."""
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return Failure(rank, host, Cause.HUNG, still_there)
        self._reader.join(1.0)
        return of_exit(code, self.tail(), rank=rank, host=host, step=None)

    def stack(self) -> str:
        """Where its threads are, if it has asked `faulthandler` to say so on SIGUSR1; with its last lines."""
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(_STACK_S)
        return self.tail()

    def tail(self) -> str:
        """Its last lines of output."""
        return "".join(self._tail)

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


def child_environment(
    cpus: int, gpus: Sequence[str], driver_path: Sequence[str], more: Mapping[str, str]
) -> dict[str, str]:
    """A copy of the task's environment with the worker's devices, threads and module path; ``more`` wins."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_SPARK_PRIVATE)}
    environment["PYTHONPATH"] = os.pathsep.join(_module_path(driver_path))
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        environment[variable] = str(cpus)
    environment.update(visible_devices(gpus))
    environment.update(more)
    return environment


def _module_path(driver_path: Sequence[str]) -> list[str]:
    """Where the task finds modules (archives of --py-files too), less what any interpreter has.

    On a local master also where the driver's program finds its own, for a model beside it.
    """
    builtin = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    builtin.add(os.path.join(os.path.realpath(sysconfig.get_paths()["stdlib"]), "lib-dynload"))  # noqa: PTH118
    paths = dict.fromkeys(path for path in (*sys.path, *driver_path) if path)
    return [path for path in paths if os.path.realpath(path) not in builtin]
