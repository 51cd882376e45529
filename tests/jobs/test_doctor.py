"""`doctor` on real sessions: a cluster that can train, and what is said of one that cannot."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from dl_on_spark.config import load_config
from dl_on_spark.jobs import doctor
from dl_on_spark.launch.machine import judge, machine_facts
from tests.cluster import REPOSITORY, StandaloneCluster, spark_environment

PIPELINE = REPOSITORY / "examples" / "flight_delay" / "pipeline.yaml"


def test_a_session_that_can_train_is_ready_and_its_executors_are_described(spark) -> None:
    findings = doctor.run(spark, None)
    assert doctor.is_ready(findings)
    assert any("of memory available" in finding.what for finding in findings)
    page = io.StringIO()
    doctor.show(findings, Console(file=page, width=100))
    assert "Ready to train." in page.getvalue()
    assert "(2 workers)" in page.getvalue()


def test_a_table_that_is_not_there_comes_first_and_nothing_is_written(spark, tmp_path: Path) -> None:
    config = load_config(PIPELINE, [f"lake={tmp_path / 'lake'}"])
    findings = doctor.run(spark, config)
    assert findings[0].level == "error"
    assert "cannot be read: not found" in findings[0].what
    assert not doctor.is_ready(findings)
    assert list(tmp_path.iterdir()) == []


def test_too_many_workers_are_said_without_trying_them(spark) -> None:
    findings = doctor.run(spark, None, workers=5)
    assert [finding.level for finding in findings] == ["error"]
    assert "5 workers need 5 slots" in findings[0].what


@pytest.mark.cluster
def test_executors_of_a_real_cluster_reach_each_other(standalone_cluster: StandaloneCluster) -> None:
    script = (
        "import sys; from pyspark.sql import SparkSession; from dl_on_spark.jobs import doctor; import json;"
        "spark = SparkSession.builder.getOrCreate();"
        "print(json.dumps(doctor.as_dict(doctor.run(spark, None)))); spark.stop()"
    )
    environment = {**spark_environment(), "MASTER": standalone_cluster.master_url}
    done = subprocess.run(
        [sys.executable, "-c", script.replace("builder.", f"builder.master('{standalone_cluster.master_url}').")],
        env=environment, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["ready"], said
    assert len([one for one in said["findings"] if one["what"].startswith("executor ")]) == 2


def report(**changes):
    machine = {**machine_facts()(), "time": 1000.0, "memory": 8 << 30, "disk": 50 << 30, **changes}
    return {"machine": machine, "peers": {}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"time": 1100.0}, "the clock is 99 s off the driver's."),
        ({"time": 900.0}, "the clock is 100 s off the driver's."),
        ({"disk": 1 << 20}, "has 0.0 GiB free."),
        ({"memory": 1 << 30}, "1.0 GiB of memory are available for 2 workers."),
        ({"address": "127.0.1.1"}, "its own host name is 127.0.1.1, which other hosts cannot reach."),
        ({"unresolved": "Name or service not known"}, "its own host name does not resolve"),
    ],
)
def test_what_is_wrong_with_a_machine_is_a_warning_with_a_way_out(changes, said) -> None:
    good = {"address": "10.0.0.7"}
    found = judge(
        report(**{**good, **changes}), "host-1", asked=1000.0, answered=1001.0, workers_here=2, local=False
    )  # fmt: skip
    assert [finding.level for finding in found] == ["warning"]
    assert said in found[0].what
    assert found[0].fix
    assert judge(report(**good), "host-1", asked=1000.0, answered=1001.0, workers_here=2, local=False) == []


def test_a_peer_that_cannot_be_reached_is_an_error_that_names_it() -> None:
    bad = {**report(address="10.0.0.7"), "peers": {"host-2": "timed out"}}
    found = judge(bad, "host-1", asked=1000.0, answered=1001.0, workers_here=1, local=False)
    assert [(finding.level, finding.where) for finding in found] == [("error", "host-1")]
    assert "host-2: timed out" in found[0].what
