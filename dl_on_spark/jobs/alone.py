"""Starts `single_process` beside finished runs: plain Keras in a process of its own, for comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import TrainingFailed
from dl_on_spark.lake import storage

_DEADLINE_S = 3600.0


def train_alone(config: PipelineConfig, run: str, output: str) -> dict[str, Any]:
    """Train on the snapshot of the folder ``run``, into the folder ``output``; what `single_process` returns.

    The driver stays free of TensorFlow. Raises `TrainingFailed`.
    """
    job = {
        "run": run,
        "output": output,
        "model": config.training.model,
        "global_batch_size": config.training.global_batch_size,
        "epochs": config.training.epochs,
        "seed": config.training.seed,
    }
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dl_on_spark.jobs.single_process"],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise TrainingFailed(f"the single Keras process failed:\n{done.stderr[-4000:]}", fix="Its traceback is above.")
    result: dict[str, Any] = json.loads(storage.read_bytes(storage.join(output, "single_process.json")))
    return result
