"""A driver that trains in stages, for `test_stage_averaging`: ``python -m tests.training.stage_run OPTIONS``.

OPTIONS is JSON: ``table``, ``folder``, ``conf`` and ``disturb``: "no", "driver" (the driver is killed) or "tasks".
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.training.small_runs import fit

SYNC = "stage_averaging:every=9,outer=nesterov(0.7,0.9)"
OPTIONS: dict[str, Any] = {
    "model": "tests.training.models:build_with_dropout_and_batch_norm",
    "num_workers": 3,
    "epochs": 3,
    "sync": SYNC,
}


def disturb(folder: str, driver: int, what: str, rank: int) -> list[Any]:
    """Callbacks that kill or hold up tasks in the first round of an epoch, each once."""
    import keras

    def first(name: str) -> bool:
        try:
            os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def java() -> int:
        return next(parent.pid for parent in psutil.Process().parents() if "java" in parent.name())

    class Disturb(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            place = (epoch, rank)
            if what == "driver" and place == (1, 1):
                os.kill(driver, signal.SIGKILL)
                time.sleep(60)
            if what != "tasks":
                return
            if place == (1, 1) and first("trainer"):
                os.kill(os.getpid(), signal.SIGKILL)
            if place == (1, 2) and first("python-worker"):
                os.kill(os.getppid(), signal.SIGKILL)
            if place == (2, 1) and first("executor"):
                os.kill(java(), signal.SIGKILL)
            if place == (2, 2) and not first("attempt-1") and first("attempt-2"):
                return  # the copy that Spark started beside the first
            until = time.monotonic() + 100
            while place == (2, 2) and not Path(folder, "attempt-2").exists():
                if time.monotonic() > until:
                    raise RuntimeError("Spark started no second attempt")
                time.sleep(0.05)

    return [Disturb()]


def main(options: dict[str, Any]) -> None:
    """Train, and print the history."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("stages")
    for key, value in options["conf"].items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    disturbed = functools.partial(disturb, options["folder"], os.getpid(), options["disturb"])
    more = {} if options["disturb"] == "no" else {"callbacks": disturbed}
    result = fit(spark, options["table"], Path(options["folder"], "run"), **OPTIONS, **more)
    print(json.dumps({"history": result.history, "restarts": result.restarts, "steps": result.steps}))
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
