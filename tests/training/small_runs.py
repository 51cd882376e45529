"""A small table, and `Trainer.fit` on it with options that most tests share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from dl_on_spark import Schema, Trainer, TrainingResult, open_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODELS = "tests.training.models"
ROWS = 1_037  # neither the batches nor the workers divide it
SCHEMA = Schema.from_dict(
    {
        "name": "small",
        "fields": {
            "a": {"type": "float", "role": "feature", "preprocess": "standardize"},
            "b": {"type": "float", "role": "feature"},
            "label": {"type": "int", "role": "label"},
        },
    }
)


def write_table(folder: Path) -> str:
    """A table of `ROWS` rows in files of very different sizes."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 2, ROWS).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)
    rows = pa.table({"a": a, "b": b, "label": (a - 3 + b > 0.3 * rng.normal(size=ROWS)).astype(np.int32)})
    for number, (start, stop) in enumerate(((0, 100), (100, 107), (107, 108), (108, 108), (108, ROWS))):
        pq.write_table(rows[start:stop], folder / f"part-{number}.parquet", row_group_size=128)
    return str(folder)


def fit(spark: SparkSession, table: str, folder: Path, **options: Any) -> TrainingResult:
    trained = {"global_batch_size": 64, "epochs": 2, "seed": 5, "quiet": True}
    trainer = {"model": f"{MODELS}:build_model", "num_workers": 2, "checkpoint_dir": str(folder), "deadline_s": 60}
    for name, value in options.items():
        (trainer if name in Trainer.__dataclass_fields__ else trained)[name] = value
    return Trainer(**trainer).fit(spark, open_table(table), schema=SCHEMA, **trained)


def weights(result: TrainingResult) -> dict[str, np.ndarray]:
    """The last checkpoint's weights and, where they are shared, optimizer variables."""
    last = sorted(Path(result.run_dir, "checkpoints").iterdir())[-1]
    (file,) = last.glob("model*.safetensors")
    return load_file(file)


def assert_same_weights(one: TrainingResult, other: TrainingResult, tolerance: float) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_same_history(one: TrainingResult, other: TrainingResult) -> None:
    assert one.history.keys() == other.history.keys()
    for name, values in one.history.items():
        np.testing.assert_allclose(other.history[name], values, rtol=1e-6, err_msg=name)
