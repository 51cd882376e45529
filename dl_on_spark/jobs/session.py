"""The Spark session of a job: the one that spark-submit configured, or a local one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dl_on_spark.config import PipelineConfig

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

# Applied only where neither spark-submit nor pipeline.yaml says otherwise.
_DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.sources.partitionOverwriteMode": "static",
    # Spark asks every 15 s whether a barrier stage has enough slots; a second is enough.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    # On Standalone too, the session waits for its executors (30 s at most): preflight gives refusals, not patience.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    # A lake table of many small days needs no 200 shuffle partitions.
    "spark.sql.adaptive.enabled": "true",
}


@contextmanager
def spark_session(config: PipelineConfig | None, name: str) -> Iterator[SparkSession]:
    """A session for one job, stopped at the end; without spark-submit it is `local[*]`."""
    from pyspark.sql import SparkSession

    given = _given()
    builder = SparkSession.builder.appName(name if config is None else f"{config.name} {name}")
    if not given.contains("spark.master"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.master("local[*]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
        log = Path(__file__).with_name("log4j2.properties")
        builder = builder.config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={log.as_uri()}")
    if (given.get("spark.master") or "local").startswith("local"):
        # Executors of a local master are this machine: they take this interpreter, not `python3` of the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for key, value in {**_DEFAULTS, **({} if config is None else config.spark)}.items():
        if not given.contains(key):
            builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def _given() -> SparkConf:
    """What spark-submit was told, spark-defaults.conf included; empty where this program runs without it."""
    from pyspark import SparkConf, SparkContext

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # Its settings lie in the JVM that it started: until we are connected to that, a SparkConf is empty.
        SparkContext._ensure_initialized()
    return SparkConf()
