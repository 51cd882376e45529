"""What a run could leave behind on this machine: processes, ports, shared memory, temporary folders."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PATIENCE_S = 10.0


def left_behind(scratch: Path | None = None) -> set[str]:
    """Names of all that this program's runs have open or have made; the JVM and its Python workers are Spark's.

    ``scratch``: the session's ``spark.local.dir``, where it is this program's alone.
    """
    own = psutil.Process()
    found = {f"listens at {link.laddr.port}" for link in own.net_connections("inet") if link.status == "LISTEN"}
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "dl_on_spark.launch.child" in process.cmdline():
                found.add(f"process {process.pid}")
    if scratch is not None:
        found |= {str(path) for path in scratch.rglob("dl_on_spark-*")}
    return found | {str(path) for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def nothing_left(scratch: Path | None = None) -> Iterator[None]:
    """What runs within leave nothing that was not there before, and no socket or pipe open in this program."""
    before, open_before = left_behind(scratch), psutil.Process().num_fds()
    yield
    until = time.monotonic() + _PATIENCE_S
    while (left := left_behind(scratch) - before) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, f"left behind: {sorted(left)}"
    # Py4J opens a connection for each thread that talks to the JVM, and keeps it for the next one.
    open_now = psutil.Process().num_fds()
    assert open_now <= open_before + 4, f"{open_now} descriptors are open, {open_before} were before"
