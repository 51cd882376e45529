"""`dl-on-spark submit`: the `spark-submit` line of a job on the pipeline's cluster.

`airflow_dags/dl_on_spark_airflow/spark_settings.py` makes the same line for Airflow, where this package is not
installed; `tests/airflow` compares the two.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import ConfigError

JOBS = ("etl", "train", "evaluate", "publish", "score", "report", "doctor", "plan")
# As Spark's own spark.redaction.regex, without the settings that name a file or a secret of Kubernetes.
_SECRET = re.compile(r"(?i)secret(?!s\.|keyref|\.?file)|password(?!\.?file)|token(?!\.?file)|access[._-]?key")
_SECRET_IN_URI = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def spark_submit_command(config: PipelineConfig, job: str, arguments: Sequence[str]) -> list[str]:
    """``spark-submit`` with the pipeline's cluster, and the job with its own `arguments`.

    Raises `ConfigError` for a job that is none, a cluster without master, and for secrets, which anyone on the
    host could read in the list of processes.
    """
    cluster = config.cluster
    if job not in JOBS:
        raise ConfigError(f"{job!r} is no job to submit.", fix=f"Name one of {', '.join(JOBS)}.")
    if cluster.master is None:
        raise ConfigError(
            "pipeline.yaml names no cluster to submit to.",
            fix="Add `cluster: {master: yarn}` (or spark://..., k8s://..., local[2]) or --set cluster.master=...",
        )
    command = ["spark-submit", "--master", cluster.master]
    for key, value in spark_settings(config, cluster.master).items():
        command += ["--conf", f"{key}={value}"]
    if cluster.properties_file:
        command += ["--properties-file", cluster.properties_file]
    if cluster.py_files:
        command += ["--py-files", ",".join(cluster.py_files)]
    if cluster.archives:
        command += ["--archives", ",".join(cluster.archives)]
    command += ["--deploy-mode", cluster.deploy_mode, f"{cluster.jobs.rstrip('/')}/{job}.py", *arguments]
    _refuse_secrets(command)
    return command


def spark_settings(config: PipelineConfig, master: str) -> dict[str, str]:
    """Spark's settings for `master`: sizes, interpreters, GPUs, then all of `spark`, which wins."""
    cluster, training = config.cluster, config.training
    executors = cluster.executors or training.num_workers
    found: dict[str, str | int | None] = {
        "spark.driver.memory": cluster.driver_memory,
        "spark.pyspark.python": cluster.python,
        "spark.pyspark.driver.python": cluster.driver_python,
    }
    if not master.startswith("local"):
        found |= {
            "spark.executor.instances": executors,
            "spark.executor.cores": cluster.executor_cores,
            "spark.executor.memory": cluster.executor_memory,
            # A barrier stage needs all its workers at once, and each only once.
            "spark.dynamicAllocation.enabled": "false",
            "spark.speculation": "false",
        }
        if training.gpus_per_worker:
            workers = max(1, cluster.executor_cores // (training.cpus_per_worker or 1))
            found["spark.executor.resource.gpu.amount"] = training.gpus_per_worker * workers
            found["spark.executor.resource.gpu.discoveryScript"] = cluster.gpu_discovery_script
            if master.startswith("k8s://"):
                found["spark.executor.resource.gpu.vendor"] = "nvidia.com"
    if master.startswith("spark://"):
        found["spark.cores.max"] = executors * cluster.executor_cores
    return {key: str(value) for key, value in found.items() if value is not None} | config.spark


def submit(config: PipelineConfig, command: Sequence[str]) -> None:
    """Become `spark-submit`: its output, exit code and signals are this process's.

    Raises `ConfigError` where the program or a file to be shipped is not there.
    """
    for file in (*config.cluster.py_files, *config.cluster.archives):
        if "://" not in file and not Path(file.partition("#")[0]).exists():
            raise ConfigError(
                f"{file}, which is shipped to the cluster, is not there.",
                fix="Make it (code: dl-on-spark package), or mend cluster.py_files and cluster.archives.",
            )
    beside = Path(sys.executable).with_name("spark-submit")
    program = shutil.which("spark-submit") or (str(beside) if beside.is_file() else None)
    if program is None:
        raise ConfigError("there is no spark-submit here.", fix="Put $SPARK_HOME/bin on the PATH.")
    environment = dict(os.environ)
    if config.cluster.deploy_mode == "client":
        # The driver is on this host: it takes this interpreter unless the settings name one, not PATH's python3.
        environment.setdefault("PYSPARK_DRIVER_PYTHON", environment.get("PYSPARK_PYTHON", sys.executable))
    sys.stdout.flush()
    os.execvpe(program, [program, *command[1:]], environment)


def _refuse_secrets(command: Sequence[str]) -> None:
    for word in command:
        key, separator, value = word.partition("=")
        if _SECRET_IN_URI.search(word) or (separator and value and _SECRET.search(key)):
            shown = key if separator else "a URI"
            raise ConfigError(
                f"{shown} holds a secret, which every user of this host could read on the command line.",
                fix="Put settings in the file of cluster.properties_file, and a store's keys in the environment "
                "(AWS_ACCESS_KEY_ID and so on).",
            )
