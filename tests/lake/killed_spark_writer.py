"""A Spark driver that is killed by a task while it replaces a day: ``killed_spark_writer.py ROOT``."""

from __future__ import annotations

import os
import signal
import sys

from pyspark.sql import SparkSession

from dl_on_spark.lake.writes import write_partitions


def main(root: str) -> None:
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    driver = os.getpid()

    def kill_driver(parts):
        for part in parts:
            os.kill(driver, signal.SIGKILL)
            yield part

    rows = spark.range(1000).mapInArrow(kill_driver, "id long")
    write_partitions(rows.selectExpr("id", "date'2013-06-01' as date"), root, partition_by="date")


if __name__ == "__main__":
    main(sys.argv[1])
