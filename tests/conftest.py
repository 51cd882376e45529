"""Fixtures shared by all tests: one local Spark session, one standalone cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.cluster import StandaloneCluster, spark_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# TensorFlow's start-up lines hide what a failing test has to say.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session of the whole test run: ``local[2]``, no UI, loopback, this interpreter."""
    from pyspark.sql import SparkSession

    os.environ.update(spark_environment())
    session = (
        SparkSession.builder.master("local[2]")
        .appName("dl_on_spark tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def standalone_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A master and two workers of one core, 2 GB and one declared GPU each, for the whole test run.

    No GPU need be there: Spark schedules the addresses, and only jobs that ask for one get it.
    """
    with StandaloneCluster(tmp_path_factory.mktemp("cluster"), gpus=[["3"], ["GPU-7f"]]) as cluster:
        yield cluster
