"""The DAGs import, lightly, and say to Spark what `dl-on-spark submit` says."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.airflow.home import DAGS, MAIN, REPOSITORY, Home

CLUSTERS = {
    "local": {"cluster": {"master": "local[2]", "driver_memory": "2g"}},
    "standalone": {"cluster": {"master": "spark://host:7077", "executor_cores": 3, "executor_memory": "6g"}},
    "yarn": {
        "cluster": {
            "master": "yarn",
            "deploy_mode": "cluster",
            "executors": 4,
            "archives": ["environment.tar.gz#environment"],
            "python": "./environment/bin/python",
            "driver_python": "/opt/venv/bin/python",
            "properties_file": "/etc/spark.conf",
        }
    },
    "kubernetes": {
        "cluster": {
            "master": "k8s://https://api:6443",
            "executor_cores": 8,
            "gpu_discovery_script": "/opt/gpus.sh",
            "jobs": "local:///opt/jobs",
        },
        "training": {"gpus_per_worker": 1, "cpus_per_worker": 4},
        "spark": {"spark.kubernetes.container.image": "registry/image:1", "spark.ui.enabled": False},
    },
}


@pytest.fixture
def pipelines(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DL_ON_SPARK_HOME", str(home.root))
    from dl_on_spark_airflow import pipelines

    return pipelines


def test_every_dag_imports_without_anything_heavy(home: Home) -> None:
    program = (
        "import sys, dl_on_spark_problems, dl_on_spark_pipelines as found\n"
        "assert list(found.flight_delay.task_dict) == ['wait_for_source', 'etl', 'validate', 'train', 'evaluate', "
        "'publish', 'score', 'report']\n"
        "heavy = {'dl_on_spark', 'pyspark', 'py4j', 'tensorflow', 'keras', 'pandas', 'numpy', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=DAGS,
        env=home.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_operator_submits_the_line_that_dl_on_spark_submit_prints(
    home: Home, pipelines, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.providers.apache.spark.hooks import spark_submit
    from dl_on_spark_airflow.job_operator import JobOperator
    from dl_on_spark_airflow.run_date import job_arguments

    monkeypatch.setattr(spark_submit, "kube_client", object(), raising=False)  # its provider is not installed here
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", "spark://elsewhere:7077")
    file = home.write_pipeline(f"line_{cluster}", {**CLUSTERS[cluster], "name": cluster})
    pipeline = pipelines.Pipeline.load(home.root, file)
    operator = JobOperator(task_id="train", pipeline=pipeline, job="train")
    operator.application_args = job_arguments("train", pipeline.config, "2013-06-20", {"sync": "gossip"})
    ours = operator._get_hook()._build_spark_submit_command(operator.application)
    command = [str(MAIN / "python"), "-m", "dl_on_spark.cli", "submit", "train", "--config", str(file)]
    command += ["--date", "2013-06-20", "--set", "training.sync=gossip", "--dry-run", "--json", "--", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    theirs = json.loads(done.stdout)
    theirs[theirs.index(str(file))] = pipeline.config
    file.unlink()
    assert ours == theirs


def test_a_secret_or_a_missing_connection_stops_a_job_before_it_is_submitted(home: Home, pipelines) -> None:
    from airflow.sdk.exceptions import AirflowNotFoundException
    from dl_on_spark_airflow.job_operator import JobOperator

    secret = home.write_pipeline("secret", {"name": "secret", "spark": {"spark.hadoop.fs.s3a.secret.key": "x"}})
    nowhere = home.write_pipeline("nowhere", {"name": "nowhere", "cluster": {"master": None}})
    for file, error in ((secret, ValueError), (nowhere, AirflowNotFoundException)):
        pipeline = pipelines.Pipeline.load(home.root, file)
        file.unlink()
        with pytest.raises(error):
            JobOperator(task_id="etl", pipeline=pipeline, job="etl")._get_hook()


def test_a_wrong_pipeline_is_named_and_the_others_stay(home: Home, pipelines) -> None:
    wrong = {
        "typo": {"name": "typo", "airflow": {"retrys": 1}},
        "twice": {},
        "zone": {"name": "zone", "airflow": {"timezone": "Mars/Base"}},
    }
    files = [home.write_pipeline(folder, changes) for folder, changes in wrong.items()]
    (home.root / "pipelines" / "broken").mkdir()
    files.append(home.root / "pipelines" / "broken" / "pipeline.yaml")
    files[-1].write_text("name: [")
    found, problems = pipelines.find_pipelines()
    for file in files:
        file.unlink()
    assert [pipeline.name for pipeline in found] == ["flight_delay"]
    assert [Path(problem.split(": ")[0]).parent.name for problem in problems] == ["broken", "twice", "typo", "zone"]
    assert "retrys" in problems[2] and "flight_delay" in problems[1]


def test_an_upstream_table_can_be_the_schedule(home: Home, pipelines) -> None:
    from dl_on_spark_airflow.nightly import nightly_dag

    file = home.write_pipeline("asset", {"name": "asset", "airflow": {"assets": ["s3://lake/raw/flights"]}})
    dag = nightly_dag(pipelines.Pipeline.load(home.root, file))
    file.unlink()
    assert [asset.uri for asset in dag.timetable.asset_condition.objects] == ["s3://lake/raw/flights"]
    assert [asset.uri for asset in dag.task_dict["score"].outlets] == [f"file://{home.root}/lake/tables/scores"]


def test_the_day_is_that_of_the_form_the_event_the_interval_or_yesterday() -> None:
    from dl_on_spark_airflow.run_date import job_arguments, run_date

    start = datetime.datetime(2013, 6, 30, 3, tzinfo=datetime.UTC)
    run = SimpleNamespace(run_after=start)
    events = {"table": [SimpleNamespace(extra={"date": "2013-06-27"}), SimpleNamespace(extra=None)]}
    context = {"params": {"date": None}, "dag_run": run}
    assert run_date(context, "UTC") == "2013-06-29"
    assert run_date({**context, "data_interval_start": start}, "UTC") == "2013-06-30"
    assert run_date({**context, "data_interval_start": start}, "America/New_York") == "2013-06-29"
    assert run_date({**context, "triggering_asset_events": events, "data_interval_start": start}, "UTC") == "2013-06-27"
    assert run_date({**context, "params": {"date": "2013-01-01"}, "data_interval_start": start}, "UTC") == "2013-01-01"
    assert job_arguments("publish", "p.yaml", "2013-06-30", {"force": "a holiday"}) == (
        ["--config", "p.yaml", "--date", "2013-06-30", "--force", "a holiday", "--json"]
    )
    assert job_arguments("doctor", "p.yaml", "2013-06-30", {}) == ["--config", "p.yaml", "--json"]


def test_sources_are_there_when_each_has_a_file_of_the_day(home: Home, pipelines) -> None:
    from dl_on_spark_airflow.sources import SourcesSensor

    pipeline = pipelines.find_pipelines()[0][0]
    sensor = SourcesSensor(task_id="wait", pipeline=pipeline)
    assert sensor.poke({"params": {"date": "2013-06-20"}})
    assert not sensor.poke({"params": {"date": "2013-06-21"}})


def test_the_requirements_are_those_of_this_environment() -> None:
    import importlib.metadata

    from packaging.requirements import Requirement

    lines = (DAGS / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(one.specifier.contains(importlib.metadata.version(one.name)) for one in wanted)
