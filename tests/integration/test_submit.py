"""`dl-on-spark submit` on a real standalone cluster: output and exit code are the job's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY, StandaloneCluster, spark_environment
from tests.integration.conftest import NEXT_DAY, PIPELINE


@pytest.mark.cluster
def test_a_job_runs_on_the_cluster_that_the_pipeline_names(
    standalone_cluster: StandaloneCluster, raw_flights: Path, py_files: Path, tmp_path: Path
) -> None:
    (tmp_path / "raw").symlink_to(raw_flights)
    cluster = {"executor_memory": "512m", "driver_memory": "512m", "py_files": [str(py_files)]}
    settings = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}
    overrides = [f"lake={tmp_path}", f"spark={json.dumps(settings)}"]
    overrides.append(f"cluster={json.dumps({'master': standalone_cluster.master_url, **cluster})}")

    def run(job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dl_on_spark.cli", "submit", job, "--config", str(PIPELINE)]
        command += [word for override in overrides for word in ("--set", override)]
        return subprocess.run(
            [*command, *arguments],
            cwd=REPOSITORY,
            env=spark_environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    done = run("etl", "--date", NEXT_DAY.isoformat(), "--", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["rows"] > 500
    assert "flight_delay etl" in {application["name"] for application in standalone_cluster.status()["completedapps"]}
    refused = run("etl", "--date", NEXT_DAY.isoformat(), "--", "--set", "training.epoch=1")
    assert refused.returncode == 2, refused.stdout[-3000:]
