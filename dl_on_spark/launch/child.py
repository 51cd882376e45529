"""The trainer's process: ``python -m dl_on_spark.launch.child <descriptor>``, started by a barrier task.

On standard input come two frames, the job and then the peers' addresses; its end means that the
task is gone, and ends this process too. On <descriptor> go our address and the outcome. Nothing
secret is in the arguments or the environment.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import faulthandler
import importlib
import os
import queue
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dl_on_spark.errors import ConfigError
from dl_on_spark.launch.child_process import SCRATCH_PREFIX
from dl_on_spark.launch.failure import Cause, Failure, of_exception
from dl_on_spark.launch.frames import FrameError, derive, read_frame, read_pipe, write_pipe
from dl_on_spark.launch.request import WorkerContext
from dl_on_spark.launch.worker_channel import WorkerChannel

_PR_SET_PDEATHSIG = 1
_BACKLOG = 256
_PEERS_DEADLINE_S = 600.0
_FLUSH_S = 5.0
EXIT_STOPPED = 143
EXIT_ORPHANED = 144


def main(report: int) -> int:
    """Run one worker; the process's exit code."""
    orders = private_stdin()
    job = read_frame(read_pipe(orders), 1 << 30)
    if job is None:
        return EXIT_ORPHANED
    start_group_watch(orders, report)
    die_with_parent(int(job["parent_pid"]))
    faulthandler.enable()
    os.set_inheritable(report, False)
    peers_box: queue.Queue[list[str]] = queue.Queue()
    threading.Thread(target=_watch_parent, args=(orders, peers_box), name="parent-watch", daemon=True).start()

    rank, host, secret = int(job["rank"]), str(job["host"]), bytes.fromhex(job["secret"])
    with _listen(str(job["bind_host"])) as listener:
        address = f"{job['bind_host']}:{listener.getsockname()[1]}"
        write_pipe(report, {"kind": "address", "address": address})
        channel: WorkerChannel | None = None
        outcome: dict[str, Any]
        try:
            channel = WorkerChannel(
                str(job["driver_address"]),
                secret,
                rank=rank,
                host=host,
                deadline_s=float(job["deadline_s"]),
                on_stop=lambda: _end(report, Failure(rank, host, Cause.STOPPED, "stopped"), EXIT_STOPPED),
                on_hang=lambda stack: _end(report, _hung(rank, host, float(job["deadline_s"]), stack), 1),
            )
            # Imports TensorFlow, most likely: meanwhile the tasks exchange addresses.
            entry = resolve(str(job["entry"]))
            peers = peers_box.get(timeout=_PEERS_DEADLINE_S)
            context = WorkerContext(
                rank=rank,
                world_size=len(peers),
                host=host,
                attempt=int(job["attempt"]),
                listener=listener,
                peers=peers,
                secret=derive(secret, "collectives"),
                cpus=int(job["cpus"]),
                gpus=list(job["gpus"]),
                deadline_s=float(job["deadline_s"]),
                channel=channel,
            )
            result = entry(context, base64.b64decode(job["payload"]))
            outcome = {"kind": "outcome", "ok": True, "result": result}
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            step = None if channel is None else channel.step
            failure = of_exception(error, rank=rank, host=host, step=step).to_dict()
            outcome = {"kind": "outcome", "ok": False, "failure": failure}
            if channel is not None:
                channel.send("failed", **failure)
        if channel is not None:
            channel.close(_FLUSH_S)
        write_pipe(report, outcome)
    return 0 if outcome["ok"] else 1


def private_stdin() -> int:
    """Move standard input out of the reach of user code, which may read ``sys.stdin``."""
    orders = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return orders


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill us with the task; Linux only, elsewhere the pipe's end does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(EXIT_ORPHANED)


def start_group_watch(orders: int, report: int) -> None:
    """Leave a small process behind that kills the whole group, and removes its scratch, when the task is gone.

    The kernel's signal to us comes too fast for us to end what the user's code started. Forked
    while we have one thread and no TensorFlow; the task kills it with the group at a normal end.
    """
    if os.fork():
        return
    os.close(report)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    hang_up = select.poll()
    hang_up.register(orders, 0)  # no reading: what the pipe carries is the trainer's
    hang_up.poll()
    scratch = os.environ.get("TMPDIR", "")
    if Path(scratch).name.startswith(SCRATCH_PREFIX):  # nobody else is left to remove it
        shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    os._exit(EXIT_ORPHANED)


def _watch_parent(orders: int, peers: queue.Queue[list[str]]) -> None:
    """Hand over the peers' addresses; end this process when the task's end of the pipe closes."""
    with contextlib.suppress(OSError, FrameError):
        while (order := read_frame(read_pipe(orders), 1 << 30)) is not None:
            peers.put([str(peer) for peer in order["peers"]])
    os._exit(EXIT_ORPHANED)


def _listen(bind_host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    return socket.create_server((bind_host, 0), family=family, backlog=_BACKLOG)


def resolve(entry: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, _, name = entry.partition(":")
    function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ConfigError(f"module {module} has no function {name!r}.", fix="Check the entry's spelling.")
    return function


def _end(report: int, failure: Failure, code: int) -> None:
    """End at once, whatever the main thread is doing; the task learns why."""
    with contextlib.suppress(OSError):
        write_pipe(report, {"kind": "outcome", "ok": False, "failure": failure.to_dict()})
    sys.stderr.flush()
    os._exit(code)


def _hung(rank: int, host: str, deadline_s: float, stack: str) -> Failure:
    return Failure(rank, host, Cause.HUNG, f"no progress for {deadline_s:g} s", traceback=f"It was at:\n{stack}")


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of TensorFlow or of the user must not keep a finished worker alive.
    os._exit(code)
