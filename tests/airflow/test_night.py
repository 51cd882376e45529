"""One night of the flights by the DAG, with real Spark: each job runs, and what it said is kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.airflow.home import DAGS, Home

_NIGHT = """
import json, sys
import dl_on_spark_pipelines as found
run = found.flight_delay.test(run_conf=json.loads(sys.argv[1]))
tasks = {task.task_id: task for task in run.get_task_instances()}
said = {name: task.xcom_pull(task_ids=name) for name, task in tasks.items()}
print("NIGHT " + json.dumps({"states": {name: str(task.state) for name, task in tasks.items()}, "said": said}))
"""


def night(home: Home, **params: str) -> dict:
    """States and results of the tasks of one `dag.test()`."""
    done = subprocess.run(
        [sys.executable, "-c", _NIGHT, json.dumps(params)],
        cwd=DAGS,
        env=home.environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("NIGHT ")]
    assert found, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return json.loads(found[-1].removeprefix("NIGHT "))


@pytest.mark.timeout(900)
def test_a_night_runs_end_to_end_and_a_refused_model_leaves_the_one_before_in_use(home: Home) -> None:
    home.airflow("db", "migrate")
    first = night(home, date="2013-06-19")
    print(first)
    assert set(first["states"].values()) == {"success"}
