"""What a run could leave behind on this machine: processes, ports, shared memory, temporary folders."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PATIENCE_S = 10.0


def left_behind() -> set[str]:
    """Names of all that this program's runs have open or have made; the JVM and its Python workers are Spark's."""
    own = psutil.Process()
    found = {f"listens at {link.laddr.port}" for link in own.net_connections("inet") if link.status == "LISTEN"}
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "dl_on_spark.launch.child" in process.cmdline():
                found.add(f"process {process.pid}")
    roots = {tempfile.gettempdir(), *os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")}
    found |= {str(path) for root in roots for path in Path(root).glob("dl_on_spark-*")}
    found |= {str(path) for root in roots for path in Path(root).glob("blockmgr-*/dl_on_spark-*")}
    return found | {str(path) for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """What runs within leave nothing that was not there before, and no socket or pipe open in this program."""
    before, open_before = left_behind(), psutil.Process().num_fds()
    yield
    until = time.monotonic() + _PATIENCE_S
    while left_behind() - before and time.monotonic() < until:
        time.sleep(0.2)
    assert not left_behind() - before
    # Py4J opens a connection for each thread that talks to the JVM, and keeps it for the next one.
    assert psutil.Process().num_fds() <= open_before + 4
