"""One night of the flights by the DAG, with real Spark: each job runs, and what it said is kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.airflow.home import DAGS, DATE, Home

_NIGHT = """
import json, sys
import dl_on_spark_pipelines as found
run = found.flight_delay.test(run_conf=json.loads(sys.argv[1]), mark_success_pattern=sys.argv[2] or None)
tasks = {task.task_id: task for task in run.get_task_instances()}
said = {name: task.xcom_pull(task_ids=name) for name, task in tasks.items()}
print("NIGHT " + json.dumps({"states": {name: str(task.state) for name, task in tasks.items()}, "said": said}))
"""


def night(home: Home, done_before: str = "", **params: str) -> tuple[dict, dict, str]:
    """States and results of the tasks of one `dag.test()`, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", _NIGHT, json.dumps(params), done_before],
        cwd=DAGS,
        env=home.environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("NIGHT ")]
    assert found, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    report = json.loads(found[-1].removeprefix("NIGHT "))
    return report["states"], report["said"], done.stdout + done.stderr


@pytest.mark.timeout(1500)
def test_a_night_runs_end_to_end_and_a_refused_model_leaves_the_one_before_in_use(home: Home) -> None:
    home.airflow("db", "migrate")
    home.fill_history()
    states, said, log = night(home, date=DATE)
    assert set(states.values()) == {"success"}, f"{states}\n{log[-6000:]}"
    assert said["etl"]["rows"] > 900
    assert said["evaluate"]["auc"] > 0
    assert said["publish"]["version"] == home.current_version() == said["score"]["model_version"] == 1
    assert Path(said["report"]["report"]).is_file()

    home.write_pipeline("flights", {"gate": {"metric": "auc", "floor": 0.999}})
    states, said, log = night(home, "wait_for_source|etl|validate|train|evaluate", date=DATE)
    assert states["publish"] == "skipped", log[-6000:]
    assert "the gate refuses" in log and "ALERT dag=flight_delay task=publish" in log
    assert states["score"] == states["report"] == "success"
    assert home.current_version() == said["score"]["model_version"] == 1

    home.write_pipeline("flights", {"training": {"epoch": 3}})
    states, _, log = night(home, "wait_for_source", date=DATE)
    home.write_pipeline("flights", {})
    assert states["etl"] == "failed" and states["score"] == "upstream_failed"
    assert "bad input, nothing was changed" in log and "did you mean 'epochs'" in log
    assert log.count("Spark-Submit cmd") == 1, "bad input is not tried again"
