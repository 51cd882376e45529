"""`dl-on-spark submit`: the line for each cluster manager, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dl_on_spark.config import load_config
from dl_on_spark.errors import ConfigError
from dl_on_spark.jobs.submit import JOBS, spark_submit_command, submit

REPOSITORY = Path(__file__).parents[2]
PIPELINE = REPOSITORY / "examples" / "flight_delay" / "pipeline.yaml"


def line(*overrides: str, job: str = "train", arguments: tuple[str, ...] = ("--date", "2013-06-30")) -> str:
    return " ".join(spark_submit_command(load_config(PIPELINE, overrides), job, arguments))


def test_yarn_gets_sizes_environment_and_neither_dynamic_allocation_nor_speculation() -> None:
    archive = "cluster.archives=[environment.tar.gz#environment]"
    sizes = ("cluster.executor_memory=6g", "cluster.executors=4", "cluster.python=./environment/bin/python")
    assert line("cluster.master=yarn", "cluster.deploy_mode=cluster", archive, *sizes) == (
        "spark-submit --master yarn --conf spark.pyspark.python=./environment/bin/python "
        "--conf spark.executor.instances=4 --conf spark.executor.cores=1 --conf spark.executor.memory=6g "
        "--conf spark.dynamicAllocation.enabled=false --conf spark.speculation=false "
        "--py-files dist/dl_on_spark.zip --archives environment.tar.gz#environment "
        "--deploy-mode cluster jobs/train.py --date 2013-06-30"
    )


def test_kubernetes_gets_the_gpus_of_as_many_workers_as_an_executor_has() -> None:
    gpus = ("training.gpus_per_worker=1", "training.cpus_per_worker=4", "cluster.executor_cores=8")
    script = "cluster.gpu_discovery_script=/opt/gpus.sh"
    said = line("cluster.master=k8s://https://api:6443", *gpus, script, "spark.spark.kubernetes.container.image=r/i:1")
    assert "--conf spark.executor.resource.gpu.amount=2 " in said
    assert "--conf spark.executor.resource.gpu.discoveryScript=/opt/gpus.sh " in said
    assert "--conf spark.executor.resource.gpu.vendor=nvidia.com " in said
    assert "--conf spark.kubernetes.container.image=r/i:1 " in said


def test_standalone_gets_the_cores_of_all_workers_and_a_local_master_no_executors() -> None:
    standalone = line("cluster.master=spark://master:7077", "cluster.executor_cores=3", "cluster.properties_file=/s")
    assert "--conf spark.cores.max=6 " in standalone and "--properties-file /s " in standalone
    local = line("cluster.master=local[2]", "cluster.driver_memory=2g", "cluster.jobs=s3://b/jobs/", job="etl")
    assert local == (
        "spark-submit --master local[2] --conf spark.driver.memory=2g --py-files dist/dl_on_spark.zip "
        "--deploy-mode client s3://b/jobs/etl.py --date 2013-06-30"
    )


def test_every_job_has_an_entry_point() -> None:
    assert {file.stem for file in (REPOSITORY / "jobs").glob("*.py")} == set(JOBS)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("spark.spark.hadoop.fs.s3a.secret.key=x", "spark.hadoop.fs.s3a.secret.key holds a secret"),
        ("spark.spark.hadoop.fs.s3a.access.key=x", "spark.hadoop.fs.s3a.access.key holds a secret"),
        ("spark.spark.executorEnv.DB_PASSWORD=x", "DB_PASSWORD holds a secret"),
        ("cluster.py_files=[https://user:key@host/code.zip]", "a URI holds a secret"),
        ("cluster.mster=yarn", "did you mean 'master'"),
        ("cluster.master=mesos://host", "cluster.master"),
        ("cluster.executor_memory=6 GB", "cluster.executor_memory"),
        ("cluster.executors=0", "cluster.executors: Input should be greater than 0"),
        ("cluster={master: 'local[2]', deploy_mode: cluster}", r"cannot run on a cluster with master local\[2\]"),
    ],
)
def test_a_secret_on_the_command_line_or_a_wrong_entry_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        line("cluster.master=yarn", override)


def test_settings_that_only_name_a_secret_pass() -> None:
    name = "spark.spark.kubernetes.driver.secretKeyRef.DB_KEY=store:key"
    assert "DB_KEY=store:key" in line("cluster.master=k8s://https://api", name)


def test_an_unknown_job_a_missing_master_and_a_missing_archive_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'trian' is no job"):
        line("cluster.master=yarn", job="trian")
    with pytest.raises(ConfigError, match="names no cluster"):
        line()
    config = load_config(PIPELINE, ["cluster.master=yarn", f"cluster.py_files=[{tmp_path}/code.zip]"])
    with pytest.raises(ConfigError, match=r"code\.zip, which is shipped"):
        submit(config, spark_submit_command(config, "train", ()))
