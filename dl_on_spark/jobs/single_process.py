"""The peer: the same model, rows, batch size and epochs under plain Keras `fit` in one process.

Runs as `python -m dl_on_spark.jobs.single_process RUN_FOLDER` next to a finished run of the Trainer, takes
schema, statistics and snapshot from it, and leaves a folder of the same shape, so that the evaluate job
judges both by the same code.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras

from dl_on_spark.input_pipeline import Cursor, RankReader, SamplePlan, to_tf_dataset
from dl_on_spark.lake import Schema, Snapshot, Statistics, storage
from dl_on_spark.training.model_loading import build, load_model_builder


def train_alone(run: str, output: str, model: str, global_batch_size: int, epochs: int, seed: int) -> dict[str, Any]:
    """Fit `model` on the snapshot of `run` with Keras alone and write the folder `output`.

    Returns Keras's history and the rows per second of the epochs after the first.
    """
    schema_yaml = storage.read_bytes(storage.join(run, "schema.yaml"))
    statistics_json = storage.read_bytes(storage.join(run, "statistics.json"))
    snapshot = Snapshot.from_json(storage.read_bytes(storage.join(run, "snapshot.json")).decode())
    schema = Schema.from_yaml(schema_yaml.decode())
    statistics = Statistics.from_json(statistics_json.decode())
    keras.utils.set_random_seed(seed)
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=global_batch_size, seed=seed)
    network = build(load_model_builder(model), schema, plan)
    cursors = iter([Cursor(epoch, 0) for epoch in range(epochs)])
    with RankReader(snapshot, plan, schema, statistics, rank=0, world_size=1) as reader:
        dataset = to_tf_dataset(reader, lambda: next(cursors), cardinality=plan.steps_per_epoch)
        network(next(iter(to_tf_dataset(reader, lambda: Cursor(0, 0))))[0])  # build before the clock starts
        clock = _EpochClock()
        history = network.fit(dataset, epochs=epochs, verbose=0, callbacks=[clock])
    # The first epoch traces the model, as the first steps of a worker do, which its own rate leaves out too.
    timed = clock.seconds[1:] or clock.seconds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        network.save(file)
        storage.write_bytes(storage.join(output, "model.keras"), file.read_bytes())
    storage.write_bytes(storage.join(output, "schema.yaml"), schema_yaml)
    storage.write_bytes(storage.join(output, "statistics.json"), statistics_json)
    result = {
        "rows_per_second": plan.rows * len(timed) / sum(timed),
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
    }
    storage.write_bytes(storage.join(output, "single_process.json"), json.dumps(result).encode())
    return result


class _EpochClock(keras.callbacks.Callback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


if __name__ == "__main__":
    train_alone(**json.loads(sys.stdin.read()))
