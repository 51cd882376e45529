"""A session that a job starts itself: an error is said once, without Java's stack in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster import REPOSITORY, spark_environment

PIPELINE = """
name: t
lake: {lake}
schema: {schema}
etl:
  transform: examples.flight_delay.transform:flight_features
  sources: {{planes: {{path: raw, format: parquet}}}}
training: {{model: "m:f"}}
spark: {{spark.master: "local[1]"}}
"""


def test_an_unreadable_file_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    lake = tmp_path / "my lake"
    (lake / "raw").mkdir(parents=True)
    (lake / "raw" / "planes.parquet").write_text("no parquet")
    schema = REPOSITORY / "schemas" / "flight_features.yaml"
    (tmp_path / "p.yaml").write_text(PIPELINE.format(lake=lake, schema=schema))
    command = [sys.executable, "-m", "dl_on_spark.cli", "etl", "--config", "p.yaml", "--date", "2013-06-01"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "300"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "planes.parquet" in done.stderr and "TableError (exit code 2)" in done.stderr
    assert "\tat org.apache" not in done.stderr and "Caused by" not in done.stderr
    assert [path.name for path in lake.iterdir()] == ["raw"]


def test_spark_submits_master_and_settings_are_taken_and_ours_fill_the_rest(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from dl_on_spark.jobs.session import spark_session\n"
        "with spark_session(None, 'x') as spark:\n"
        "    of = spark.sparkContext.getConf().get\n"
        "    print(spark.sparkContext.master, of('spark.sql.adaptive.enabled'), of('spark.sql.session.timeZone'))\n"
    )
    environment = spark_environment()
    command = [f"{environment['SPARK_HOME']}/bin/spark-submit", "--master", "local[1]"]
    command += ["--conf", "spark.ui.enabled=false", "--conf", "spark.sql.adaptive.enabled=false", str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["local[1] false UTC"], done.stderr[-3000:]
