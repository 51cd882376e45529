"""What a barrier task does: start the trainer in a process of its own, introduce it, watch it."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from dl_on_spark.launch.child_process import ChildProcess, child_environment
from dl_on_spark.launch.failure import Cause, Failure, of_exception
from dl_on_spark.launch.gpus import share_of_rank
from dl_on_spark.launch.request import LaunchRequest
from dl_on_spark.launch.worker_channel import report_once

_ADDRESS_DEADLINE_S = 60.0


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
        environment = child_environment(cpus, gpus, spec.driver_path, spec.request.env)
        self._child = ChildProcess("dl_on_spark.launch.child", environment)
        job = {
            "rank": rank,
            "host": host,
            "bind_host": _bindable(host, spec.local),
            "parent_pid": os.getpid(),
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
            self._child.order(job)
            first = self._child.next_report(time.monotonic() + _ADDRESS_DEADLINE_S)
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
        self._child.order({"peers": peers})
        outcome = self._child.next_report(None)
        if outcome is None or outcome.get("kind") != "outcome":
            return {"ok": False, "failure": self._death().to_dict()}
        outcome.pop("kind")
        return outcome

    def end(self) -> None:
        """Kill what is left of the child and of what it started, and reap it."""
        self._child.end()

    def _death(self) -> Failure:
        return self._child.death(self.rank, self.host, f"the process did not start in {_ADDRESS_DEADLINE_S:g} s")


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
