"""The barrier stage: one task per worker, started all at once or not at all. Without the barrier: tasks as slots come.

``spark.range(0, n, 1, n).mapInArrow(task, schema, barrier=True, profile=...)`` is the one path that
classic Spark and Spark Connect share. The job runs in a thread of its own, under a tag by which it
can be cancelled.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dl_on_spark import errors
from dl_on_spark.errors import InputError, PreflightError, TableError
from dl_on_spark.lake.spark_session import spark_context

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_SCHEMA = "rank int, outcome string"
_AFTER_TRACEBACK = re.compile(r"\s*(at \S+\(|SQLSTATE:|Driver stacktrace|$)")
_OF_JAVA = re.compile(r"\s*(at \S+\(|Caused by:|\.\.\. \d+ more|Driver stacktrace|An error occurred while calling)")
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w{5};?$")
# Classes of SQLSTATE by which Spark says that data or a query over it is wrong: a value, a name, a file.
_BAD_DATA = re.compile(r"SQLSTATE: (22|42|KD)\w{3}")
# Somebody's cancelJobGroup, interruptTag, stop or kill in Spark's UI, under classic Spark and under Connect.
_CANCELLED = re.compile(
    r"SPARK_JOB_CANCELLED|OPERATION_CANCELED|Job \d+ cancelled|Stage \d+ (was )?cancelled|SparkContext was shut down"
)
_JAVA_CLASS = re.compile(r"^:?\s*([\w$]+\.)+[\w$]*(Exception|Error): ")


class BarrierJob:
    """Runs `work()` once in each of `num_tasks` barrier tasks; each returns a dict of plain values.

    ``barrier=False``: in ordinary tasks, which Spark may run one after the other, again, or twice; of each
    partition it takes one result.

    ``start`` returns at once. ``outcomes`` and ``error`` are set when ``join`` returns True; `on_end`
    is called in the job's thread at that moment.
    """

    def __init__(
        self,
        spark: SparkSession,
        work: Callable[[], dict[str, Any]],
        num_tasks: int,
        *,
        profile: ResourceProfile | None = None,
        name: str = "dl_on_spark workers",
        barrier: bool = True,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._spark = spark
        self._work = work
        self._num_tasks = num_tasks
        self._profile = profile
        self._name = name
        self._barrier = barrier
        self._on_end = on_end
        self.tag = f"dl_on_spark-{uuid.uuid4().hex}"
        self.outcomes: list[dict[str, Any]] | None = None
        self.error: BaseException | None = None
        self._thread = self._make_thread()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the job's end; False when it still runs after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Ask Spark to end the job; returns at once."""
        context = spark_context(self._spark)
        with contextlib.suppress(Exception):  # the session is gone, and the job with it
            if context is not None:
                context.cancelJobsWithTag(self.tag)
            else:
                self._spark.interruptTag(self.tag)

    def active_tasks(self) -> int | None:
        """How many of the tasks run now; None where Spark does not say (Spark Connect)."""
        context = spark_context(self._spark)
        if context is None:
            return None
        tracker = context.statusTracker()
        running = 0
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numTasks == self._num_tasks:
                running = max(running, info.numActiveTasks)
        return running

    def _make_thread(self) -> threading.Thread:
        from pyspark import InheritableThread

        # Takes the caller's scheduler pool and the like along.
        if "session" in inspect.signature(InheritableThread.__init__).parameters:
            options: dict[str, Any] = {"session": self._spark}
        else:
            options = {}
        thread: threading.Thread = InheritableThread(self._run, name="barrier-job", daemon=True, **options)
        return thread

    def _run(self) -> None:
        try:
            context = spark_context(self._spark)
            if context is not None:
                context.addJobTag(self.tag)
                context.setJobDescription(self._name)
            else:
                self._spark.addTag(self.tag)
            frame = self._spark.range(0, self._num_tasks, 1, self._num_tasks)
            options: dict[str, Any] = {} if self._profile is None else {"profile": self._profile}
            rows = frame.mapInArrow(_as_arrow_task(self._work), _SCHEMA, barrier=self._barrier, **options).collect()
            self.outcomes = [json.loads(row.outcome) for row in sorted(rows, key=lambda row: row.rank)]
        except BaseException as error:  # handed to the thread that waits
            self.error = error
        finally:
            self._on_end()


def _as_arrow_task(
    work: Callable[[], dict[str, Any]],
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import json

        import pyarrow as pa
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        assert context is not None
        rank = context.partitionId()
        schema = pa.schema([("rank", pa.int32()), ("outcome", pa.string())])
        yield pa.RecordBatch.from_pylist([{"rank": rank, "outcome": json.dumps(work())}], schema)

    return task


def setting(spark: SparkSession, key: str, default: str) -> str:
    """A Spark setting of the session or its application."""
    value = spark.conf.get(key, default)
    return default if value is None else value


def is_local(spark: SparkSession) -> bool:
    """Whether tasks run inside the driver's own JVM (``local[n]``, not ``local-cluster``)."""
    return re.fullmatch(r"local(\[.*\])?", setting(spark, "spark.master", "")) is not None


def on_this_machine(spark: SparkSession) -> bool:
    """Whether tasks run where this program does: a local master, which a Connect server may have elsewhere."""
    if not is_local(spark):
        return False
    return spark_context(spark) is not None or is_loopback(spark.client.host)


def is_loopback(host: str) -> bool:
    """Whether a name or address means the machine that uses it."""
    return host in {"localhost", "::1", "[::1]"} or host.startswith("127.")


def worker_profile(spark: SparkSession, gpus_per_worker: int, cpus_per_worker: int | None) -> ResourceProfile | None:
    """What one worker's task asks of the scheduler, where that differs from the application's own.

    Task requests only: executor requests in a profile need dynamic allocation, which a barrier
    stage refuses. A local master schedules cores alone, so there the launcher shares out the rest.
    """
    if is_local(spark):
        return None
    cpus = int(setting(spark, "spark.task.cpus", "1"))
    gpus = float(setting(spark, "spark.task.resource.gpu.amount", "0"))
    if (cpus_per_worker or cpus) == cpus and (not gpus_per_worker or gpus == gpus_per_worker):
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
    from pyspark.sql import DataFrame

    if "profile" not in inspect.signature(DataFrame.mapInArrow).parameters:
        raise PreflightError(
            f"this Spark cannot give one stage its own resources (need gpus_per_worker={gpus_per_worker}, "
            f"cpus_per_worker={cpus_per_worker or cpus}; have {gpus:g} and {cpus} per task).",
            fix=f"Use Spark 4, or set spark.task.resource.gpu.amount={gpus_per_worker} and "
            f"spark.task.cpus={cpus_per_worker or cpus}.",
        )
    requests = TaskResourceRequests().cpus(cpus_per_worker or cpus)
    if gpus_per_worker:
        requests = requests.resource("gpu", gpus_per_worker)
    profile: ResourceProfile = ResourceProfileBuilder().require(requests).build
    return profile


def input_error(error: BaseException) -> InputError | None:
    """The `InputError` that a Spark task raised over the user's rows or model; None for any other failure.

    Spark hands on a Python task's exception as text, whose last line is ``module.Class: message``. What it
    finds itself has an SQLSTATE, whose first two letters are the class of the error.
    """
    headline, traceback = plain_cause(error)
    if traceback is None and _BAD_DATA.search(str(error)):
        headline = _SQLSTATE.sub("", headline)
        return TableError(headline, fix="Mend the file or value it names, or what reads it: schema, transform, filter.")
    name, _, message = headline.partition(": ")
    module, _, kind = name.rpartition(".")
    found = getattr(errors, kind, None) if module == errors.__name__ else None
    if not (isinstance(found, type) and issubclass(found, InputError)):
        return None
    told = found.__new__(found)
    errors.DLOnSparkError.__init__(told, message)
    return told


def is_cancelled(error: BaseException) -> bool:
    """Whether Spark ended the job because somebody asked for that."""
    return _CANCELLED.search(str(error)) is not None


def plain_cause(error: BaseException) -> tuple[str, str | None]:
    """What Spark's exception says without Java's stack: one line, and a Python traceback if any."""
    text = str(error)
    start = text.find("Traceback (most recent call last):")
    if start >= 0:
        lines = text[start:].splitlines()
        ends = (i for i, line in enumerate(lines) if _AFTER_TRACEBACK.match(line))
        lines = lines[: next(ends, len(lines))]
        return lines[-1].strip(), "\n".join(lines)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _OF_JAVA.match(line)]
    # Of a failed stage Spark says first that it failed, and on the next line why.
    reasons = [line for line in lines if "Job aborted" not in line] or lines or [type(error).__name__]
    return _JAVA_CLASS.sub("", reasons[0]), None
