"""Stages of ordinary tasks, one after the other: what Spark may retry, speculate on and run in waves.

A stage's task gives an order to the trainer's process that its Python worker keeps (`stage_child`), or does small
work itself. It has no peers and no driver channel: its outcome is its result, of which Spark takes one for each
partition, whatever tasks it killed or started twice. So a task writes under names of its own, and tells them.

A failure that another try may mend (a killed process, a hung one, storage) is raised, and Spark tries again; one
that would come again (bad input, the user's error) is told, and ends the run with its own traceback.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import Cancelled, WorkerFailed
from dl_on_spark.launch.barrier import BarrierJob, on_this_machine, plain_cause, worker_profile
from dl_on_spark.launch.child_process import ChildProcess, child_environment
from dl_on_spark.launch.failure import Cause, Failure, first_cause, of_exception, to_error
from dl_on_spark.launch.gpus import local_gpus
from dl_on_spark.launch.launch import terminate_as_interrupt
from dl_on_spark.launch.request import LaunchRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHILD = "dl_on_spark.launch.stage_child"
_POLL_S = 0.02
_CANCEL_S = 10.0
_FAILURE = re.compile(r"stage failure ([A-Za-z0-9+/=]+)")
_kept: tuple[tuple[Any, ...], ChildProcess] | None = None


@dataclass(frozen=True)
class StageSpec:
    """What travels inside the tasks. ``run`` tells the processes of one attempt of a run from others."""

    request: LaunchRequest
    run: str
    local_gpus: tuple[str, ...] = ()
    driver_path: tuple[str, ...] = ()


class Stages:
    """The stages of one attempt of a run."""

    def __init__(self, spark: SparkSession, request: LaunchRequest, run: str) -> None:
        self._spark, self._request = spark, request
        local = on_this_machine(spark)
        gpus = tuple(local_gpus()) if local and request.gpus_per_worker else ()
        self._spec = StageSpec(request, run, gpus, tuple(sys.path) if local else ())
        self._profile = worker_profile(spark, request.gpus_per_worker, request.cpus_per_worker)

    def order(self, order: dict[str, Any], tasks: int, name: str) -> list[dict[str, Any]]:
        """Give the order to a trainer's process in each of ``tasks`` tasks; results by rank.

        The process finds ``rank`` and ``task``, the number of the task's attempt, in its order too.
        """
        spec = self._spec
        return self._run(lambda: _serve(spec, order), tasks, name)

    def call(self, work: Callable[[int, int], dict[str, Any]], tasks: int, name: str) -> list[dict[str, Any]]:
        """Call ``work(rank, task)`` in each of ``tasks`` tasks; results by rank."""
        return self._run(lambda: _call(work), tasks, name)

    def _run(self, work: Callable[[], dict[str, Any]], tasks: int, name: str) -> list[dict[str, Any]]:
        job = BarrierJob(self._spark, work, tasks, profile=self._profile, name=f"dl_on_spark: {name}", barrier=False)
        with terminate_as_interrupt():
            job.start()
            try:
                self._wait(job)
            except KeyboardInterrupt:
                raise Cancelled(
                    "stopped by the user or the scheduler.", fix="Run the same command again to resume."
                ) from None
            finally:
                if not job.join(0):
                    job.cancel()
                    job.join(_CANCEL_S)
        if job.error is not None:
            raise _cause_of(job.error) from None
        outcomes = job.outcomes or []
        failures = [Failure.from_dict(one["failure"]) for one in outcomes if not one["ok"]]
        if failures:
            raise to_error(first_cause(failures), failures)
        return [one["result"] for one in outcomes]

    def _wait(self, job: BarrierJob) -> None:
        """Until the job ends; an error where no task of it has run for the deadline."""
        deadline_s, busy = self._request.deadline_s, time.monotonic()
        looked = busy
        while not job.join(_POLL_S):
            now = time.monotonic()
            if now - looked < 1:
                continue
            looked = now
            if job.active_tasks() != 0:  # None: Spark does not say
                busy = now
            elif now - busy > deadline_s:
                raise WorkerFailed(
                    f"no task of the stage has run for {deadline_s:g} s (deadline_s): the cluster has no free slot.",
                    fix="End the other jobs of this application, or raise deadline_s.",
                )


def _call(work: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    rank = context.partitionId()
    try:
        return {"ok": True, "result": work(rank, context.taskAttemptId())}
    except Exception as error:
        return _told(of_exception(error, rank=rank, host=socket.gethostname(), step=None))


def _serve(spec: StageSpec, order: dict[str, Any]) -> dict[str, Any]:
    """The work of one task: its process's outcome."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    rank, host = context.partitionId(), socket.gethostname()
    cpus = spec.request.cpus_per_worker or max(1, int(context.cpus()))
    full = {**order, "rank": rank, "host": host, "task": context.taskAttemptId()}
    gpus = _gpus(context, spec, rank)
    child, used = _child(spec, cpus, gpus)
    outcome = _ask(child, full, spec.request.deadline_s)
    if outcome is None and used and not child.alive:  # it left just as the order came
        child, _ = _child(spec, cpus, gpus)
        outcome = _ask(child, full, spec.request.deadline_s)
    if outcome is not None and outcome["ok"]:
        return outcome
    failure = Failure.from_dict(outcome["failure"]) if outcome is not None else _end_of(child, rank, host, spec)
    child.end()
    return _told(failure)


def _told(failure: Failure) -> dict[str, Any]:
    if failure.retryable:
        text = base64.b64encode(json.dumps(failure.to_dict()).encode()).decode()
        raise RuntimeError(f"{failure.message} (stage failure {text})")
    return {"ok": False, "failure": failure.to_dict()}


def _child(spec: StageSpec, cpus: int, gpus: list[str]) -> tuple[ChildProcess, bool]:
    """The process that this Python worker keeps for the run, and whether it was there already."""
    global _kept  # noqa: PLW0603 - a Python worker of Spark has one, as it has one task at a time
    key = (spec.run, cpus, tuple(gpus))
    if _kept is not None:
        if _kept[0] == key and _kept[1].alive:
            return _kept[1], True
        _kept[1].end()
    child = ChildProcess(_CHILD, child_environment(cpus, gpus, spec.driver_path, spec.request.env))
    _kept = key, child
    threading.Thread(target=child.reap, name="stage-child", daemon=True).start()
    child.order(
        {
            "parent_pid": os.getpid(),
            "entry": spec.request.entry,
            "payload": base64.b64encode(spec.request.payload).decode(),
            "deadline_s": spec.request.deadline_s,
            "cpus": cpus,
        }
    )
    return child, False


def _ask(child: ChildProcess, order: dict[str, Any], deadline_s: float) -> dict[str, Any] | None:
    """The outcome of an order; None when the process ended or said nothing for the deadline."""
    child.order(order)
    while (said := child.next_report(time.monotonic() + deadline_s)) is not None:
        if said["kind"] == "outcome":
            return said
    return None


def _end_of(child: ChildProcess, rank: int, host: str, spec: StageSpec) -> Failure:
    if not child.alive:
        return child.death(rank, host, "")
    deadline_s = spec.request.deadline_s
    stack = child.stack()
    return Failure(rank, host, Cause.HUNG, f"no progress for {deadline_s:g} s (deadline_s)", traceback=stack)


def _gpus(context: Any, spec: StageSpec, rank: int) -> list[str]:
    resource = context.resources().get("gpu")
    if resource is not None:
        return [str(address) for address in resource.addresses]
    count = spec.request.gpus_per_worker
    if not count or not spec.local_gpus:
        return []
    # A local master assigns none, and which slot this is it does not say: tasks may meet on one.
    first = rank % max(1, len(spec.local_gpus) // count) * count
    return list(spec.local_gpus[first : first + count])


def _cause_of(error: BaseException) -> Exception:
    found = _FAILURE.search(str(error))
    if found is not None:
        return to_error(Failure.from_dict(json.loads(base64.b64decode(found[1]))))
    headline, traceback = plain_cause(error)
    return WorkerFailed(f"Spark ended a stage: {headline}", traceback=traceback)
