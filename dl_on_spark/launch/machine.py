"""The machine an executor runs on, as seen from inside its task: clock, room, names, and the way to its peers.

The functions made here travel by value, as in `executor_probe`, so they import nothing of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dl_on_spark.launch.finding import Finding

_LEAST_DISK_BYTES = 2 << 30
_LEAST_MEMORY_BYTES = 1 << 30
_MOST_SKEW_S = 2.0
_PEERS = 64


def machine_facts() -> Callable[[], dict[str, Any]]:
    """A function that tells clock, free room and names of the machine that it runs on; it never raises."""

    def facts() -> dict[str, Any]:
        import contextlib
        import os
        import pathlib
        import shutil
        import socket
        import tempfile
        import time

        found: dict[str, Any] = {"time": time.time(), "temporary": tempfile.gettempdir(), "cores": os.cpu_count()}
        with contextlib.suppress(OSError):
            found["disk"] = shutil.disk_usage(found["temporary"]).free
        with contextlib.suppress(OSError, ValueError, IndexError), pathlib.Path("/proc/meminfo").open() as lines:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
            found["memory"] = sizes.get("MemAvailable")
        with contextlib.suppress(OSError):
            found["interfaces"] = [name for _, name in socket.if_nameindex() if name != "lo"]
        try:
            found["address"] = socket.gethostbyname(socket.gethostname())
        except OSError as error:
            found["unresolved"] = str(error)
        return found

    return facts


def peer_check(most: int = _PEERS, timeout_s: float = 5.0) -> Callable[[Any, str], dict[str, str]]:
    """A function of a barrier task's context and own host: which of the next peers cannot be reached, and why.

    Every task listens where Spark says it is, and connects to the ``most`` ranks after it: among fewer tasks than
    that every pair is tried in both directions.
    """

    def failures(context: Any, host: str) -> dict[str, str]:
        import contextlib
        import socket

        with socket.create_server((socket.gethostbyname(host), 0), backlog=4 * most) as server:
            addresses = context.allGather(f"{host}:{server.getsockname()[1]}")
            rank, world, failed = context.partitionId(), len(addresses), {}
            for step in range(1, min(most, world - 1) + 1):
                peer = addresses[(rank + step) % world]
                name, _, port = peer.rpartition(":")
                try:
                    socket.create_connection((name, int(port)), timeout=timeout_s).close()
                except OSError as error:
                    failed[name] = str(error)
            with contextlib.suppress(Exception):  # nobody stops listening while others may still come
                context.barrier()
        return failed

    return failures


def judge(
    report: dict[str, Any], where: str, *, asked: float, answered: float, workers_here: int, local: bool
) -> list[Finding]:
    """What of a task's ``machine`` and ``peers`` is wrong. It was looked at between ``asked`` and ``answered``,
    seconds of the driver's clock."""
    machine, findings = report["machine"], []
    skew = max(asked - machine["time"], machine["time"] - answered, 0.0)
    if skew > _MOST_SKEW_S:
        findings.append(
            Finding(
                "warning",
                f"the clock is {skew:.0f} s off the driver's.",
                where,
                "Let the hosts keep time (chrony, ntpd): logs and leases compare times.",
            )
        )
    disk = machine.get("disk")
    if disk is not None and disk < _LEAST_DISK_BYTES:
        findings.append(
            Finding(
                "warning",
                f"{machine['temporary']} has {_gib(disk)} free.",
                where,
                "Free some, or let spark.local.dir and TMPDIR name a disk with room.",
            )
        )
    memory = machine.get("memory")
    if memory is not None and memory < _LEAST_MEMORY_BYTES * workers_here:
        findings.append(
            Finding(
                "warning",
                f"{_gib(memory)} of memory are available for {workers_here} workers.",
                where,
                "TensorFlow alone takes about 1 GiB a worker: run fewer on a host, or lower spark.executor.memory.",
            )
        )
    if not local:
        findings += _judge_names(machine, where)
    for peer, failure in report.get("peers", {}).items():
        findings.append(
            Finding(
                "error",
                f"cannot reach the worker on {peer}: {failure}.",
                where,
                "Let executors open connections to each other on any port, and set SPARK_LOCAL_IP on hosts with "
                "several interfaces to an address that the others reach.",
            )
        )
    return findings


def described(machine: dict[str, Any]) -> str:
    """A machine in one line."""
    parts = [f"{machine['cores']} cores"]
    if machine.get("memory") is not None:
        parts.append(f"{_gib(machine['memory'])} of memory available")
    if machine.get("disk") is not None:
        parts.append(f"{_gib(machine['disk'])} free in {machine['temporary']}")
    if machine.get("interfaces"):
        parts.append(f"interfaces {', '.join(machine['interfaces'])}")
    return ", ".join(parts)


def _judge_names(machine: dict[str, Any], where: str) -> list[Finding]:
    if "unresolved" in machine:
        problem = f"its own host name does not resolve ({machine['unresolved']})."
    elif str(machine.get("address", "")).startswith("127."):
        problem = f"its own host name is {machine['address']}, which other hosts cannot reach."
    else:
        return []
    fix = "Mend /etc/hosts or DNS there, or set SPARK_LOCAL_IP and SPARK_LOCAL_HOSTNAME."
    return [Finding("warning", problem, where, fix)]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
