"""Launches by spark-submit on a real standalone cluster, with GPU addresses declared to it."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY, spark_environment

USER_MODULE = """
import os
import subprocess
import threading
from pathlib import Path


def run(context, payload):
    context.channel.send("log", text="hello")
    return {
        "rank": context.rank,
        "gpus": context.gpus,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "file": __file__,
        "peers": context.peers,
        "folder": str(Path.cwd()),
    }


def hang(context, payload):
    child = subprocess.Popen(["sleep", "600"])
    context.channel.send("pids", step=8, pids=[os.getpid(), child.pid])
    threading.Event().wait(600)
"""

DRIVER = """
import json, sys
import psutil
from pyspark.sql import SparkSession
from dl_on_spark.errors import DLOnSparkError
from dl_on_spark.launch import LaunchRequest, launch, preflight

spark = SparkSession.builder.getOrCreate()
said, heard, pids = {}, [], {}

def kill_executor_of_rank_1(message):
    pids[message.rank] = message.fields["pids"]
    if len(pids) == 2:
        executor = psutil.Process(pids[1][0])
        while "CoarseGrainedExecutorBackend" not in " ".join(executor.cmdline()):
            executor = executor.parent()
        executor.kill()

try:
    for name, options in json.loads(sys.argv[1]).items():
        entry = options.pop("entry", None)
        said[name] = [finding.level for finding in preflight(spark, 2, **options)]
        if entry:
            said[name] = launch(spark, LaunchRequest(2, entry, **options), heard.append)
    said["heard"] = sorted(message.rank for message in heard)
    if len(sys.argv) > 2:
        launch(spark, LaunchRequest(2, sys.argv[2]), kill_executor_of_rank_1)
except DLOnSparkError as error:
    said["error"] = [type(error).__name__, str(error)]
    left = [psutil.Process(pid) for own in pids.values() for pid in own if psutil.pid_exists(pid)]
    said["left"] = len(psutil.wait_procs(left, timeout=5)[1])
spark.stop()
print(json.dumps(said))
"""


@pytest.fixture
def driver(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    return script


@pytest.mark.cluster
@pytest.mark.faults
def test_two_executors_get_code_and_gpus_and_a_killed_one_is_named_and_leaves_nothing(
    standalone_cluster, driver, tmp_path
):
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as code:
        code.writestr("user_model/__init__.py", "")
        code.writestr("user_model/entry.py", USER_MODULE)
    runs = {
        "cpus": {"entry": "user_model.entry:run"},
        "gpus": {"entry": "user_model.entry:run", "gpus_per_worker": 1},
        "cpus again": {"entry": "user_model.entry:run"},
    }
    done = standalone_cluster.submit(
        driver,
        json.dumps(runs),
        "user_model.entry:hang",
        conf={"spark.executor.resource.gpu.amount": "1"},
        py_files=[archive],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    kind, text = said["error"]
    assert kind == "WorkerFailed", text
    assert "worker 1 on 127.0.0.1 at step 8: its task is gone: ExecutorLostFailure" in text
    assert "at org." not in text
    assert said["left"] == 0
    assert [one["visible"] for one in said["cpus"]] == ["-1", "-1"]
    assert sorted(one["visible"] for one in said["gpus"]) == ["3", "GPU-7f"]
    assert all(one["gpus"] == [one["visible"]] for one in said["gpus"])
    assert [one["visible"] for one in said["cpus again"]] == ["-1", "-1"]
    assert all("code.zip" in one["file"] for one in said["cpus"])
    assert len({one["folder"] for one in said["cpus"]}) == 2  # two executors
    assert len(set(said["cpus"][0]["peers"])) == 2
    assert said["heard"] == [0, 0, 0, 1, 1, 1]


def test_dynamic_allocation_and_speculation_are_refused_together_before_anything_runs(driver):
    environment = spark_environment()
    done = subprocess.run(
        [
            str(Path(environment["SPARK_HOME"]) / "bin" / "spark-submit"),
            "--master=local[2]",
            "--conf=spark.ui.enabled=false",
            "--conf=spark.dynamicAllocation.enabled=true",
            "--conf=spark.dynamicAllocation.shuffleTracking.enabled=true",
            "--conf=spark.speculation=true",
            str(driver),
            json.dumps({"checked": {}}),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        cwd=REPOSITORY,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kind, text = json.loads(done.stdout.strip().splitlines()[-1])["error"]
    assert kind == "PreflightError"
    assert "Set spark.dynamicAllocation.enabled=false" in text
    assert "Set spark.speculation=false." in text
