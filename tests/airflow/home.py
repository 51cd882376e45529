"""A host as docs/airflow.md describes it, in a folder: $DL_ON_SPARK_HOME, $AIRFLOW_HOME and the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DAGS = REPOSITORY / "airflow_dags"
# Where spark-submit and the jobs' Python are; Airflow's own environment has neither TensorFlow nor the package.
MAIN = Path(os.environ.get("DL_ON_SPARK_VENV", REPOSITORY / ".venv")) / "bin"
FIRST_DAY, LAST_DAY = "2013-06-09", "2013-06-20"  # of the raw tables
DATE = "2013-06-17"  # of the first night
_SMALL: dict[str, dict[str, Any]] = {
    "training": {"days": 5, "holdout_days": 2, "epochs": 1, "global_batch_size": 1024},
    "gate": {"metric": "log_loss"},  # no floor: the first model passes, and a later one that is not worse
    "cluster": {"master": "local[2]", "driver_memory": "1g"},
    "spark": {"spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1"},
    "airflow": {"retry_delay_s": 1},
}


@dataclass(frozen=True)
class Home:
    """The folder; ``root/pipelines/flights/pipeline.yaml`` is the one pipeline."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Home:
        """Lay down raw flights of 12 days, the archive and a small pipeline."""
        (root / "jobs").symlink_to(REPOSITORY / "jobs")
        home = cls(root)
        lay_down = (
            "import datetime; from examples.flight_delay.raw import lay_down; day = datetime.date.fromisoformat; "
            f"lay_down({str(root / 'lake' / 'raw')!r}, first=day({FIRST_DAY!r}), last=day({LAST_DAY!r}))"
        )
        for command in (["-c", lay_down], ["-m", "dl_on_spark.cli", "package", "--output", str(home.archive)]):
            subprocess.run(
                [str(MAIN / "python"), *command], cwd=REPOSITORY, check=True, capture_output=True, timeout=120
            )
        home.write_pipeline("flights", {})
        return home

    def fill_history(self) -> None:
        """Run the ETL for the days before `DATE`, as one does before the first night."""
        words = ["-m", "dl_on_spark.cli", "etl", "--config", str(self.root / "pipelines" / "flights" / "pipeline.yaml")]
        words += ["--start-date", "2013-06-11", "--date", "2013-06-16"]
        subprocess.run([str(MAIN / "python"), *words], cwd=REPOSITORY, check=True, capture_output=True, timeout=300)

    @property
    def archive(self) -> Path:
        """What `dl-on-spark package` made."""
        return self.root / "dist" / "dl_on_spark.zip"

    def write_pipeline(self, folder: str, changes: dict[str, Any]) -> Path:
        """The example's pipeline, made small, with `changes` on top, section by section."""
        example = REPOSITORY / "examples" / "flight_delay"
        data = yaml.safe_load((example / "pipeline.yaml").read_text())
        data |= {"lake": str(self.root / "lake"), "schema": str((example / data["schema"]).resolve())}
        for source in data["etl"]["sources"].values():
            source["schema"] = str((example / source["schema"]).resolve())
        data["gate"] = {}
        for section in (_SMALL, changes):
            for key, value in section.items():
                data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
        file = self.root / "pipelines" / folder / "pipeline.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(data))
        return file

    def environment(self) -> dict[str, str]:
        """Of every Airflow process: SQLite in the folder, no examples, `spark-submit` of the main environment."""
        found = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHONPATH"))}
        return found | {
            "PATH": f"{MAIN}{os.pathsep}{os.environ['PATH']}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "DL_ON_SPARK_HOME": str(self.root),
            "AIRFLOW_HOME": str(self.root / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        }

    def airflow(self, *words: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command `airflow`."""
        command = [str(Path(sys.executable).with_name("airflow")), *words]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert not check or done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def rows(self, table: str) -> dict[str, bytes]:
        """Every data file of a table of the lake, by its path."""
        folder = self.root / "lake" / table
        files = sorted(file for file in folder.rglob("*.parquet") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}

    def current_version(self) -> int:
        """Which model the pipeline uses."""
        pointer = self.root / "lake" / "models" / "flight_delay" / "current.json"
        return int(json.loads(pointer.read_text())["version"])
