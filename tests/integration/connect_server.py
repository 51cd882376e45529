"""A real Spark Connect server of the pip package, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import spark_environment

_DEADLINE_S = 90.0


@contextlib.contextmanager
def connect_server(folder: Path, master: str = "local[2]") -> Iterator[str]:
    """The server's address, ``sc://127.0.0.1:port``; its log is ``folder/connect.log``."""
    environment = {**spark_environment(), "SPARK_DAEMON_MEMORY": "1g"}  # Spark counts the server among its daemons
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": folder / "warehouse",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    }
    options = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    submit = Path(environment["SPARK_HOME"], "bin", "spark-submit")
    service = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with (folder / "connect.log").open("wb") as log:
        server = subprocess.Popen(
            [submit, "--master", master, *options, *service],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for(port, server, folder / "connect.log")
        yield f"sc://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(20)


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.2)
