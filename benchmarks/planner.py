"""The planner against reality: predicted and measured steps of 1 to 4 workers on this machine.

    python benchmarks/planner.py [--batch 2048] [--workers 1,2,3,4] [--json]

The plan is made as `dl-on-spark plan` makes it, from steps timed on one worker and on two. Then so many workers
are launched and their steps timed by the trainer's own loop, at the same global batch. More workers than cores share
them, which the plan has to know.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SYNCS = {"allreduce": "allreduce", "local SGD, every 16": "local_sgd:every=16"}
ROWS = 500_000


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch", type=int, default=2048, help="rows of a step over all workers")
    options.add_argument("--workers", default="1,2,3,4")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    counts = [int(count) for count in chosen.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), chosen.batch, counts)
    print(json.dumps(rows, indent=1)) if chosen.json else show(rows, chosen.batch)


def compare(folder: Path, batch: int, counts: list[int]) -> list[dict[str, Any]]:
    """A row for each way and number of workers."""
    from pyspark.sql import SparkSession

    from benchmarks import training
    from dl_on_spark import plan
    from dl_on_spark.config import PipelineConfig
    from dl_on_spark.jobs import plan as job

    training.write_table(folder / "tables" / "features" / "date=2024-01-01", ROWS)
    training.write_table(folder / "tables" / "features" / "date=2024-01-02", 1000)
    (folder / "schema.yaml").write_text(json.dumps(training.schema().to_dict()))
    config = PipelineConfig.model_validate(
        {
            "name": "planner",
            "lake": str(folder),
            "schema": str(folder / "schema.yaml"),
            "etl": {"transform": "none:none", "sources": {}},
            "training": {
                "model": "benchmarks.training:build_model",
                "global_batch_size": batch,
                "days": 1,
                "holdout_days": 1,
            },
        }
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master(f"local[{max(counts)}]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        date = datetime.date(2024, 1, 2)
        found = job.measure(spark, config, date)
        planned = plan(found.workload, found.cluster, counts, tuple(SYNCS))
        _, data = job.training_data(spark, config, date)
        rows = []
        for count in counts:
            said = job.time_steps(spark, config, count, [(batch, sync) for sync in SYNCS.values()], data)
            for case, way in enumerate(SYNCS):
                measured = max(one["timed"][case]["seconds"] for one in said)
                (estimate,) = (e for e in planned.of(way) if e.workers == count)
                rows.append({"way": way, "workers": count, "planned_s": estimate.step_s, "measured_s": measured})
    finally:
        spark.stop()
    return rows


def show(rows: list[dict[str, Any]], batch: int) -> None:
    grid = Grid("way", "workers", "planned", "measured", "off by", title=f"A step of {batch:,} rows")
    for row in rows:
        off = row["planned_s"] / row["measured_s"] - 1
        times = (f"{row[key] * 1e3:.2f} ms" for key in ("planned_s", "measured_s"))
        grid.add_row(row["way"], str(row["workers"]), *times, f"{off:+.0%}")
    Console().print(grid)


if __name__ == "__main__":
    main()
