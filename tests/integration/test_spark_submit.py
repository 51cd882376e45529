"""The jobs are spark-submit jobs: on a local master and on a real standalone cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY, StandaloneCluster, spark_environment
from tests.integration.conftest import DATE, FIRST_DAY, NEXT_DAY, PIPELINE, SMALL


def submit(
    master: list[str], py_files: Path, job: str, lake: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """`spark-submit` of one job as the README shows it; the checkout itself is not on the Python path."""
    environment = spark_environment()
    environment.pop("PYTHONPATH")
    settings = [argument for override in (f"lake={lake}", *SMALL) for argument in ("--set", override)]
    script = [f"jobs/{job}.py", "--config", str(PIPELINE), *arguments, *settings]
    return subprocess.run(
        [*master, "--py-files", str(py_files), *script],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(params=["local", "standalone"])
def master(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "local":
        spark_submit = str(Path(spark_environment()["SPARK_HOME"]) / "bin" / "spark-submit")
        return [spark_submit, "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
    cluster: StandaloneCluster = request.getfixturevalue("standalone_cluster")
    return cluster.submit_command("JOB", conf={"spark.driver.memory": "1g"})[:-1]


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_jobs_run_one_after_the_other_and_score_the_next_day(
    request: pytest.FixtureRequest, master: list[str], py_files: Path, raw_flights: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    (lake / "raw").symlink_to(raw_flights)
    day = ("--date", DATE.isoformat(), "--json")
    etl = last_json(
        submit(
            master,
            py_files,
            "etl",
            lake,
            "--start-date",
            FIRST_DAY.isoformat(),
            "--date",
            NEXT_DAY.isoformat(),
            "--json",
        )
    )
    assert etl["rows"] > 15_000
    trained = last_json(submit(master, py_files, "train", lake, *day))
    assert trained["epochs"] == 2
    assert trained["restarts"] == 0
    evaluated = last_json(submit(master, py_files, "evaluate", lake, *day))
    assert evaluated["auc"] > 0.55
    assert evaluated["log_loss"] > 0
    published = last_json(submit(master, py_files, "publish", lake, *day, "--set", "gate.floor=0.5"))
    assert published["version"] == 1
    scored = last_json(submit(master, py_files, "score", lake, "--date", NEXT_DAY.isoformat(), "--json"))
    assert scored["rows"] > 500

    page = Path(last_json(submit(master, py_files, "report", lake, *day))["report"])
    assert page == lake / "reports" / "flight_delay" / f"{DATE}.html"
    assert "Calibration on the held-out days" in page.read_text(encoding="utf-8")

    refused = submit(master, py_files, "publish", lake, *day, "--set", "gate.floor=0.999")
    said = refused.stdout + refused.stderr  # spark-submit puts the program's errors on its own output
    assert refused.returncode == 3, said[-3000:]
    assert "the gate refuses" in said
    assert "Traceback" not in said
    assert "at org.apache" not in said
    first = last_json(submit(master, py_files, "train", lake, *day, "--set", "training.seed=8", "--run-name", "other"))
    assert first["run"].endswith("/other")
    last_json(submit(master, py_files, "evaluate", lake, *day, "--run-name", "other"))
    forced = ("--run-name", "other", "--set", "gate.floor=0.999", "--force", "a test")
    assert last_json(submit(master, py_files, "publish", lake, *day, *forced))["version"] == 2
    command = [sys.executable, "-m", "dl_on_spark.cli", "rollback", "--config", str(PIPELINE), "--set", f"lake={lake}"]
    back = subprocess.run([*command, "--json"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(back.stdout)["version"] == 1
    if master[master.index("--master") + 1].startswith("spark://"):
        cluster: StandaloneCluster = request.getfixturevalue("standalone_cluster")
        ran = {application["name"] for application in cluster.status()["completedapps"]}
        assert ran >= {f"flight_delay {job}" for job in ("etl", "train", "evaluate", "publish", "score")}
