"""What can be known before training starts: refusals with have, need and the setting to change.

Order: settings (free), slots (asked of the scheduler), then one short barrier stage that looks at
every executor it lands on. A blocking finding raises :class:`PreflightError` with all that block.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import PreflightError
from dl_on_spark.lake.spark_session import spark_context
from dl_on_spark.launch.barrier import (
    BarrierJob,
    is_local,
    on_this_machine,
    plain_cause,
    setting,
    worker_profile,
)
from dl_on_spark.launch.driver_channel import ChannelServer
from dl_on_spark.launch.executor_probe import make_probe, own_versions
from dl_on_spark.launch.finding import Finding
from dl_on_spark.launch.gpus import local_gpus
from dl_on_spark.launch.launch import driver_hosts
from dl_on_spark.launch.machine import described, judge
from dl_on_spark.launch.slots import count_slots, explain_slots, way_to_more_slots

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

# All of preflight ends within this many seconds, whatever the cluster does.
DEADLINE_S = 30.0
_SLOTS_WAIT_S = 15.0
_CANCEL_S = 2.0
# Tasks that look around where the workers need not run at once.
_PROBES = 8
# Another version of these on an executor gives other numbers or unreadable models; of the rest, a warning.
_MUST_MATCH = ("python", "tensorflow", "keras", "dl_on_spark")


def preflight(
    spark: SparkSession,
    num_workers: int,
    *,
    gpus_per_worker: int = 0,
    cpus_per_worker: int | None = None,
    readable: Sequence[str] = (),
    writable: Sequence[str] = (),
    barrier: bool = True,
) -> list[Finding]:
    """Whether `num_workers` workers can run now; every finding, good ones included.

    `readable` and `writable` are URIs tried from every executor that the probe reaches. Nothing is
    left in them. ``barrier=False``: the workers are ordinary tasks, for which any slot and any setting will do.
    Raises :class:`PreflightError` naming all blocking findings, within 30 s.
    """
    findings = examine(
        spark,
        num_workers,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
        readable=readable,
        writable=writable,
        barrier=barrier,
    )
    blocking = _blocking(findings)
    if blocking:  # one error for all; the fixes come last
        fixes = list(dict.fromkeys(finding.fix for finding in blocking if finding.fix))
        lines = [f"{finding.what} [{finding.where}]" for finding in blocking]
        raise PreflightError("\n".join(lines), fix=" ".join(fixes))
    return findings


def examine(
    spark: SparkSession,
    num_workers: int,
    *,
    gpus_per_worker: int = 0,
    cpus_per_worker: int | None = None,
    readable: Sequence[str] = (),
    writable: Sequence[str] = (),
    peers: bool = False,
    barrier: bool = True,
) -> list[Finding]:
    """The findings of `preflight`, bad ones too. What cannot be looked at because of an error before it is left out.

    ``peers``: try every way between executors as well, which takes a second more.
    """
    started = time.monotonic()
    findings: list[Finding] = []
    if barrier:
        findings = check_settings(lambda key, default: setting(spark, key, default), num_workers)
        if _blocking(findings):
            return findings
    profile = worker_profile(spark, gpus_per_worker, cpus_per_worker)
    if barrier:
        findings += _check_slots(spark, num_workers, profile, gpus_per_worker, cpus_per_worker)
        if _blocking(findings):
            return findings
    else:
        num_workers = min(num_workers, _PROBES)
    left = DEADLINE_S - _CANCEL_S - (time.monotonic() - started)
    return findings + _check_executors(
        spark, num_workers, profile, readable, writable, max(5.0, left), peers=peers, barrier=barrier
    )


def check_settings(setting_of: Callable[[str, str], str], num_workers: int) -> list[Finding]:
    """Settings with which a barrier stage cannot run at all, or not to its end."""
    findings = []
    if setting_of("spark.dynamicAllocation.enabled", "false").lower() == "true":
        findings.append(
            Finding(
                "error",
                "spark.dynamicAllocation.enabled=true: Spark refuses barrier stages with dynamic allocation.",
                "Spark settings",
                f"Set spark.dynamicAllocation.enabled=false and spark.executor.instances={num_workers} "
                "(Standalone: spark.cores.max).",
            )
        )
    if setting_of("spark.speculation", "false").lower() == "true":
        findings.append(
            Finding(
                "error",
                "spark.speculation=true: a second copy of a worker's task would train the same rows twice.",
                "Spark settings",
                "Set spark.speculation=false.",
            )
        )
    return findings


def compare_versions(driver: dict[str, str | None], reports: Sequence[dict[str, Any]]) -> list[Finding]:
    """Versions on the executors against the driver's (the first executor's where the driver has none)."""
    findings = []
    for name, own in driver.items():
        expected, whose = own, "the driver"
        if expected is None:
            expected, whose = reports[0]["versions"].get(name), str(reports[0]["host"])
        for report in reports:
            have = report["versions"].get(name)
            where = _where(report)
            if have is None:
                fix = "Install it there, or set PYSPARK_PYTHON (spark.pyspark.python) to one with it."
                if name == "dl_on_spark":
                    fix = "Ship it: dl-on-spark package, then spark-submit --py-files dist/dl_on_spark.zip."
                findings.append(Finding("error", f"{name} is missing on an executor.", where, fix))
            elif have != expected:
                findings.append(
                    Finding(
                        "error" if name in _MUST_MATCH else "warning",
                        f"{name} is {have} on an executor and {expected} on {whose}.",
                        where,
                        "Use one environment: set PYSPARK_PYTHON (spark.pyspark.python) to it on every host.",
                    )
                )
    return findings


def _check_slots(
    spark: SparkSession,
    need: int,
    profile: ResourceProfile | None,
    gpus_per_worker: int,
    cpus_per_worker: int | None,
) -> list[Finding]:
    cpus = cpus_per_worker or int(setting(spark, "spark.task.cpus", "1"))
    if gpus_per_worker and is_local(spark) and not on_this_machine(spark):
        return [
            Finding(
                "error",
                "a local master on the Connect server's machine does not share out its GPUs.",
                spark.client.host,
                "Start the Connect server on a cluster master, or train beside it.",
            )
        ]
    if is_local(spark) and gpus_per_worker and len(local_gpus()) < need * gpus_per_worker:
        have_gpus = len(local_gpus())
        return [
            Finding(
                "error",
                f"{need} workers of {gpus_per_worker} GPUs need {need * gpus_per_worker}; this machine shows "
                f"{have_gpus}.",
                "this machine",
                "Ask for fewer workers or gpus_per_worker=0, or look at CUDA_VISIBLE_DEVICES and nvidia-smi.",
            )
        ]
    facts = explain_slots(spark, cpus, gpus_per_worker)
    try:
        have = count_slots(spark, need, profile, wait_s=_SLOTS_WAIT_S)
    except Exception as error:
        headline, _ = plain_cause(error)
        return [
            Finding(
                "error",
                f"the cluster manager does not give a stage its own resources: {headline}",
                setting(spark, "spark.master", "Spark"),
                f"Set spark.task.cpus={cpus}"
                + (f" and spark.task.resource.gpu.amount={gpus_per_worker}." if gpus_per_worker else "."),
            )
        ]
    if have is None:
        return [
            Finding(
                "warning",
                f"how many slots the cluster has cannot be asked through Spark Connect {facts}.",
                setting(spark, "spark.master", "Spark"),
                f"If the {need} workers do not start together, ask for fewer or free some slots.",
            )
        ]
    if is_local(spark):  # a local master schedules by spark.task.cpus alone
        have = have * int(setting(spark, "spark.task.cpus", "1")) // cpus
    if have < need:
        return [
            Finding(
                "error",
                f"{need} workers need {need} slots; the cluster has {have} {facts}.",
                setting(spark, "spark.master", "Spark"),
                way_to_more_slots(spark, need, have, cpus, gpus_per_worker),
            )
        ]
    return [Finding("ok", f"{have} slots for {need} workers {facts}", setting(spark, "spark.master", "Spark"))]


def _check_executors(
    spark: SparkSession,
    num_workers: int,
    profile: ResourceProfile | None,
    readable: Sequence[str],
    writable: Sequence[str],
    wait_s: float,
    *,
    peers: bool,
    barrier: bool,
) -> list[Finding]:
    bind_host, host = driver_hosts(spark)
    token = f".dl_on_spark_preflight_{secrets.token_hex(8)}"
    with (
        ChannelServer(secrets.token_bytes(32), SimpleQueue(), bind_host=bind_host, host=host) as server,
        _tokens(writable, token) as (folders, refused),
    ):
        if refused:
            return refused
        job = BarrierJob(
            spark,
            make_probe(server.address, folders, list(readable), token, peers=peers),
            num_workers,
            profile=profile,
            name="dl_on_spark: preflight",
            barrier=barrier,
        )
        asked = time.time()
        job.start()
        if not job.join(wait_s):
            running = job.active_tasks()
            job.cancel()
            job.join(_CANCEL_S)
            slow = _explain_slow_probe(num_workers, running, wait_s)
            if not (barrier or running):  # executors may come when there is work
                slow = Finding("warning", f"no slot came free in {wait_s:.0f} s: the run waits for one.", slow.where)
            return [slow]
    if job.outcomes is None:
        return [_explain_probe_failure(spark, job.error)]
    answered, local = time.time(), on_this_machine(spark)
    findings = compare_versions(own_versions(), job.outcomes)
    here = Counter(report["host"] for report in job.outcomes)
    for report in job.outcomes:
        findings += _judge_report(report, server.address)
        where, workers = _where(report), here[report["host"]]
        findings += judge(report, where, asked=asked, answered=answered, workers_here=workers, local=local)
    return findings


def _explain_slow_probe(num_workers: int, running: int | None, wait_s: float) -> Finding:
    """Tasks that never started have no slots; tasks that run and say nothing are on hosts that are too busy.

    Under Spark Connect (`running` is None) it may be either.
    """
    if running is None:
        return Finding(
            "error",
            f"{num_workers} tasks that start Python and look around have not ended in {wait_s:.0f} s.",
            "the cluster",
            "It has fewer slots, other jobs hold them, or its hosts are busy: ask for fewer workers, or look there.",
        )
    if running:
        return Finding(
            "error",
            f"{running} of {num_workers} tasks that start Python and look around have not ended in {wait_s:.0f} s.",
            "the executors",
            "Their hosts are busy, or their Python is slow to start: look at their load, then try again.",
        )
    return Finding(
        "error",
        f"{num_workers} tasks did not start together within {wait_s:.0f} s.",
        "the cluster",
        "Other jobs may hold the slots: end them, or ask for fewer workers.",
    )


def _where(report: dict[str, Any]) -> str:
    return f"{report['host']}, {report['interpreter']}"


def _judge_report(report: dict[str, Any], driver_address: str) -> list[Finding]:
    where = _where(report)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    gpus = f", GPUs {', '.join(report['gpus'])}" if report["gpus"] else ""
    machine = described(report["machine"])
    findings = [Finding("ok", f"executor {report['executor']}: {versions}; {machine}{gpus}", where)]
    if report["driver"]:
        findings.append(
            Finding(
                "warning",
                f"cannot reach the driver at {driver_address}: {report['driver']}. No progress will be seen.",
                where,
                "Set spark.driver.host to a name that executors resolve, and let them open ports on it.",
            )
        )
    for uri, failure in report["read"].items():
        if failure:
            findings.append(
                Finding(
                    "error",
                    f"{uri} cannot be read: {failure}.",
                    where,
                    "Use a path that every host can read.",
                )
            )
    for uri, failure in report["write"].items():
        if failure:
            findings.append(
                Finding(
                    "error",
                    f"{uri} cannot be written: {failure}.",
                    where,
                    "Use a folder that the driver and every executor share and may write.",
                )
            )
    return findings


@contextlib.contextmanager
def _tokens(writable: Sequence[str], token: str) -> Iterator[tuple[dict[str, str], list[Finding]]]:
    """The driver's own file in each writable folder while the executors look for it.

    A local folder that does not exist yet is tried at its nearest ancestor, so nothing is created.
    """
    folders: dict[str, str] = {}
    refused: list[Finding] = []
    written: list[str] = []
    try:
        for uri in writable:
            from dl_on_spark.lake import storage

            local = storage.local_path(uri)
            folder = uri if local is None else str(_nearest_folder(local))
            try:
                storage.write_bytes(storage.join(folder, token), b"dl_on_spark preflight")
            except Exception as error:
                refused.append(
                    Finding(
                        "error",
                        f"{uri} cannot be written: {type(error).__name__}: {error}.",
                        "the driver",
                        "Use a folder that the driver and every executor share and may write.",
                    )
                )
                continue
            written.append(storage.join(folder, token))
            folders[uri] = folder
        yield folders, refused
    finally:
        for file in written:
            with contextlib.suppress(Exception):  # a leftover of a few bytes must not hide the findings
                storage.delete(file)


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _explain_probe_failure(spark: SparkSession, error: BaseException | None) -> Finding:
    """The probe itself could not run in Python: most often the interpreter is the wrong one."""
    headline, _ = plain_cause(error or RuntimeError("no answer"))
    context = spark_context(spark)
    interpreter = "python3" if context is None else str(context.pythonExec)
    where = f"{_ask_interpreter(spark, interpreter)}"
    python = own_versions()["python"]
    return Finding(
        "error",
        f"an executor cannot run this driver's Python tasks (the driver has Python {python}): {headline}",
        where,
        "Set PYSPARK_PYTHON (spark.pyspark.python) to an interpreter with this version, pyarrow, TensorFlow "
        "and dl_on_spark on every host.",
    )


def _ask_interpreter(spark: SparkSession, interpreter: str) -> str:
    """Host, path and version of the executors' interpreter, asked by the JVM and a shell alone."""
    context = spark_context(spark)
    if context is None:
        return interpreter
    try:
        jvm = context._jvm
        script = 'echo $(hostname), $(command -v "$1" || echo "$1: not found"), $("$1" -V 2>&1)'
        command = jvm.java.util.ArrayList()
        for word in ("sh", "-c", script, "sh", interpreter):
            command.append(word)
        numbers = jvm.java.util.ArrayList()
        numbers.append(0)
        answers = context._jsc.parallelize(numbers, 1).pipe(command).collect()
    except Exception:
        return interpreter
    return "; ".join(dict.fromkeys(str(answer) for answer in answers))


def _blocking(findings: Sequence[Finding]) -> list[Finding]:
    """Those with which training cannot run, each once."""
    return list(dict.fromkeys(finding for finding in findings if finding.level == "error"))
