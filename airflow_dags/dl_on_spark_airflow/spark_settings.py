"""What SparkSubmitOperator is given for a pipeline: the same line as `dl-on-spark submit` makes.

`dl_on_spark/jobs/submit.py` is the other writing of it, for hosts with dl_on_spark; tests/airflow compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"(?i)secret(?!s\.|keyref|\.?file)|password(?!\.?file)|token(?!\.?file)|access[._-]?key")


def operator_options(data: Mapping[str, Any], job: str) -> dict[str, Any]:
    """Arguments of SparkSubmitOperator but for the settings, which hang on the master."""
    cluster = data.get("cluster") or {}
    return {
        "application": f"{cluster.get('jobs', 'jobs').rstrip('/')}/{job}.py",
        "py_files": ",".join(cluster.get("py_files", ["dist/dl_on_spark.zip"])),
        "archives": ",".join(cluster.get("archives", [])) or None,
        "properties_file": cluster.get("properties_file"),
    }


def spark_settings(data: Mapping[str, Any], master: str) -> dict[str, str]:
    """Spark's settings for `master`. Raises ValueError for a secret, which would stand on a command line."""
    cluster, training = data.get("cluster") or {}, data.get("training") or {}
    executors = cluster.get("executors") or training.get("num_workers", 2)
    cores = cluster.get("executor_cores", 1)
    gpus = training.get("gpus_per_worker", 0)
    found: dict[str, Any] = {
        "spark.driver.memory": cluster.get("driver_memory"),
        "spark.pyspark.python": cluster.get("python"),
        "spark.pyspark.driver.python": cluster.get("driver_python"),
    }
    if not master.startswith("local"):
        found |= {
            "spark.executor.instances": executors,
            "spark.executor.cores": cores,
            "spark.executor.memory": cluster.get("executor_memory"),
            "spark.dynamicAllocation.enabled": "false",
            "spark.speculation": "false",
        }
        if gpus:
            workers = max(1, cores // (training.get("cpus_per_worker") or 1))
            found["spark.executor.resource.gpu.amount"] = gpus * workers
            found["spark.executor.resource.gpu.discoveryScript"] = cluster.get("gpu_discovery_script")
            if master.startswith("k8s://"):
                found["spark.executor.resource.gpu.vendor"] = "nvidia.com"
    if master.startswith("spark://"):
        found["spark.cores.max"] = executors * cores
    found |= data.get("spark") or {}
    secret = next((key for key in found if _SECRET.search(key)), None)
    if secret:
        raise ValueError(f"spark: {secret} holds a secret; put it in the file of cluster.properties_file")
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in found.items() if v is not None}
