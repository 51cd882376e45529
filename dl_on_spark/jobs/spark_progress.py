"""A bar for Spark's own work on a terminal: tasks done of the stages that run; nothing in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dl_on_spark.lake.spark_session import spark_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.3
_JOIN_S = 5.0


@contextlib.contextmanager
def spark_progress(spark: SparkSession, what: str, *, quiet: bool) -> Iterator[None]:
    """Show Spark's tasks while the body runs. Stages come one after the other, so the total grows."""
    context = spark_context(spark)
    if context is None or quiet or not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    columns = (TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        tracker = context.statusTracker()

        def watch() -> None:
            seen: dict[int, tuple[int, int]] = {}
            while not ended.is_set():
                for stage in tracker.getActiveStageIds():
                    info = tracker.getStageInfo(stage)
                    if info is not None:
                        seen[stage] = (info.numCompletedTasks, info.numTasks)
                active = set(tracker.getActiveStageIds())
                done = sum(done if stage in active else total for stage, (done, total) in seen.items())
                total = sum(total for _, total in seen.values())
                bar.update(task, completed=done, total=total or None)
                time.sleep(_POLL_S)

        watcher = threading.Thread(target=watch, name="spark-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(_JOIN_S)
