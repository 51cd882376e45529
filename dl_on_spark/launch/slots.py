"""How many tasks the cluster can run at once, for a resource profile, without waiting for a stage.

A barrier stage with too few slots is retried by Spark in silence, so the count comes first. It is
the one Spark itself compares (``maxNumConcurrentTasks``), polled while executors register.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from dl_on_spark.lake.spark_session import spark_context
from dl_on_spark.launch.barrier import is_local, setting

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_POLL_S = 0.2


def count_slots(spark: SparkSession, need: int, profile: ResourceProfile | None, *, wait_s: float) -> int | None:
    """Slots for tasks of `profile`, at least `need` or what there is after `wait_s`.

    None where this program cannot know: a cluster behind Spark Connect. Raises what Spark raises for a profile that
    its cluster manager does not support.
    """
    context = spark_context(spark)
    if context is None:
        cores = re.fullmatch(r"local\[(\d+)\]", setting(spark, "spark.master", ""))
        return None if cores is None else int(cores[1]) // int(setting(spark, "spark.task.cpus", "1"))
    scheduler = context._jsc.sc()
    manager = scheduler.resourceProfileManager()
    if profile is None:
        wanted = manager.defaultResourceProfile()
    else:
        wanted = profile._java_resource_profile
        manager.addResourceProfile(wanted)
    until = time.monotonic() + (0.0 if is_local(spark) else wait_s)
    while True:
        have = int(scheduler.maxNumConcurrentTasks(wanted))
        if have >= need or time.monotonic() >= until:
            return have
        time.sleep(_POLL_S)


def explain_slots(spark: SparkSession, cpus: int, gpus: int) -> str:
    """The settings behind the number of slots, as ``key=value`` in parentheses."""
    keys = ["spark.master", "spark.executor.instances", "spark.executor.cores", "spark.cores.max"]
    if gpus:
        keys.append("spark.executor.resource.gpu.amount")
    said = [f"{key}={value}" for key in keys if (value := setting(spark, key, ""))]
    said.append(f"cores per worker={cpus}")
    if gpus:
        said.append(f"GPUs per worker={gpus}")
    return f"({', '.join(said)})"


def way_to_more_slots(spark: SparkSession, need: int, have: int, cpus: int, gpus: int) -> str:
    """What to ask for, or to set, so that `need` workers fit."""
    fewer = f"Ask for num_workers={have}, or set " if have else "Set "
    master = setting(spark, "spark.master", "")
    if re.fullmatch(r"local(\[.*\])?", master):
        return f"{fewer}the master to local[{need * cpus}]."
    more = f"spark.cores.max={need * cpus} (Standalone) or spark.executor.instances={need} with "
    more += f"spark.executor.cores={cpus}"
    if gpus:
        more += f" and spark.executor.resource.gpu.amount={gpus}"
    return f"{fewer}{more}, and see that the cluster has that many free."
