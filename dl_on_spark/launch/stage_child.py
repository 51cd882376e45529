"""The trainer's process of retryable stages: ``python -m dl_on_spark.launch.stage_child <descriptor>``.

Unlike a barrier task's it outlives its task, since TensorFlow takes seconds to start: it serves one order after
the other, of whatever rank, and keeps nothing of one for the next. It ends with Spark's Python worker, and by
itself when nobody wants it any more.
"""

from __future__ import annotations

import base64
import faulthandler
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dl_on_spark.launch.child import EXIT_ORPHANED, die_with_parent, private_stdin, resolve, start_group_watch
from dl_on_spark.launch.failure import of_exception
from dl_on_spark.launch.frames import read_frame, read_pipe, write_pipe

_LOOK_S = 1.0
_TELL_EVERY_S = 1.0


class StageServer(Protocol):
    """What the entry of a stage's process makes of ``(context, payload)``."""

    def serve(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what is ordered; plain values."""

    def wanted(self) -> bool:
        """Whether more orders may come; asked once a second between two orders."""


@dataclass(frozen=True)
class StageContext:
    """What the entry knows of its place. ``alive``: to be called now and then during an order."""

    cpus: int
    deadline_s: float
    alive: Callable[[], None]


def main(report: int) -> int:
    """Serve orders; the process's exit code."""
    orders = private_stdin()
    job = read_frame(read_pipe(orders), 1 << 30)
    if job is None:
        return EXIT_ORPHANED
    start_group_watch(orders, report)
    die_with_parent(int(job["parent_pid"]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.set_inheritable(report, False)
    deadline_s = float(job["deadline_s"])
    server: StageServer | None = None
    while (order := _next_order(orders, server, deadline_s)) is not None:
        rank, host = int(order["rank"]), str(order["host"])
        try:
            if server is None:
                context = StageContext(int(job["cpus"]), deadline_s, _teller(report))
                server = resolve(str(job["entry"]))(context, base64.b64decode(job["payload"]))
            outcome = {"ok": True, "result": server.serve(order)}
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            failure = of_exception(error, rank=rank, host=host, step=order.get("step"))
            outcome = {"ok": False, "failure": failure.to_dict()}
        write_pipe(report, {"kind": "outcome", **outcome})
    return 0


def _next_order(orders: int, server: StageServer | None, deadline_s: float) -> dict[str, Any] | None:
    """The next order; None when the task is gone, or nobody wants this process."""
    until = time.monotonic() + deadline_s
    while not select.select([orders], [], [], _LOOK_S)[0]:
        if time.monotonic() > until or (server is not None and not server.wanted()):
            return None
    return read_frame(read_pipe(orders), 1 << 30)


def _teller(report: int) -> Callable[[], None]:
    """Says at most once a second that this process gets on."""
    last = 0.0

    def tell() -> None:
        nonlocal last
        if time.monotonic() - last > _TELL_EVERY_S:
            last = time.monotonic()
            write_pipe(report, {"kind": "alive"})

    return tell


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
