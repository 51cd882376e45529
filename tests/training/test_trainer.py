"""`Trainer.fit` on a real Spark session: right weights, right metrics, resumed runs, clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from dl_on_spark import LocalSGD, Schema, Trainer, TrainingResult, open_table
from dl_on_spark.errors import InputError, SchemaError, TrainingFailed
from dl_on_spark.sync import Nesterov
from tests.cluster import REPOSITORY
from tests.training import models

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


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("table")
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
    return load_file(last / "model.safetensors")


def assert_same_weights(one: TrainingResult, other: TrainingResult, tolerance: float) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_same_history(one: TrainingResult, other: TrainingResult) -> None:
    assert one.history.keys() == other.history.keys()
    for name, values in one.history.items():
        np.testing.assert_allclose(other.history[name], values, rtol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, table: str, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    return fit(spark, table, tmp_path_factory.mktemp("undisturbed") / "run", validation=open_table(table))


def test_two_workers_take_the_steps_of_one_and_report_its_metrics(
    spark: SparkSession, table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    alone = fit(spark, table, tmp_path / "run", num_workers=1, validation=open_table(table))
    assert undisturbed.steps == alone.steps == 2 * 17
    assert_same_weights(alone, undisturbed, 1e-4)
    assert undisturbed.history.keys() == alone.history.keys() >= {"loss", "accuracy", "auc", "val_loss", "val_auc"}
    for name, values in alone.history.items():
        np.testing.assert_allclose(undisturbed.history[name], values, rtol=2e-3, err_msg=name)
    assert undisturbed.bytes_sent > 0 == alone.bytes_sent


@pytest.mark.faults
@pytest.mark.parametrize("sync", ["allreduce", LocalSGD(every=4, outer=Nesterov(0.7, 0.9))])
def test_a_worker_killed_in_mid_epoch_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    spark: SparkSession, table: str, tmp_path: Path, sync: Any
) -> None:
    options = {"sync": sync, "steps_per_execution": 2, "checkpoint_every": 6}
    expected = fit(spark, table, tmp_path / "calm", **options)
    killer = models.kill_once(str(tmp_path / "killed"), rank_to_kill=1, step=9)
    result = fit(spark, table, tmp_path / "killed-run", callbacks=killer, **options)
    assert (tmp_path / "killed").exists()
    assert result.restarts == 1
    assert result.steps == expected.steps
    assert_same_weights(expected, result, 0.0)
    assert_same_history(expected, result)
    events = [json.loads(line) for line in Path(result.run_dir, "events.jsonl").read_text().splitlines()]
    assert [e["resume_from"] for e in events if e["event"] == "attempt"] == [None, "step-00000006-a001"]
    assert not [p for p in psutil.Process().children(recursive=True) if "launch.child" in " ".join(p.cmdline())]


def test_a_run_stopped_at_an_epochs_end_goes_on_as_if_undisturbed(
    spark: SparkSession, table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    validation = open_table(table)
    first = fit(spark, table, tmp_path / "run", epochs=1, validation=validation)
    assert first.epochs == 1
    second = fit(spark, table, tmp_path / "run", epochs=2, validation=validation, resume="must")
    assert second.steps == undisturbed.steps
    assert_same_weights(undisturbed, second, 0.0)
    assert_same_history(undisturbed, second)
    again = fit(spark, table, tmp_path / "run", epochs=2, validation=validation)
    assert again == second


def test_a_run_goes_on_with_another_number_of_workers(
    spark: SparkSession, table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    validation = open_table(table)
    fit(spark, table, tmp_path / "run", epochs=1, validation=validation, num_workers=1)
    resumed = fit(spark, table, tmp_path / "run", epochs=2, validation=validation, num_workers=2, resume="must")
    assert_same_weights(undisturbed, resumed, 1e-4)


def test_random_state_and_batch_statistics_survive_a_resume(spark: SparkSession, table: str, tmp_path: Path) -> None:
    model = f"{MODELS}:build_with_dropout_and_batch_norm"
    expected = fit(spark, table, tmp_path / "calm", model=model)
    fit(spark, table, tmp_path / "run", model=model, epochs=1)
    resumed = fit(spark, table, tmp_path / "run", model=model, epochs=2, resume="must")
    assert_same_weights(expected, resumed, 0.0)


def test_a_users_error_on_one_rank_is_the_first_thing_shown_and_ends_the_run(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed) as caught:
        fit(spark, table, tmp_path / "run", callbacks=models.raise_on_rank(1))
    assert "user callback broke on purpose" in caught.value.message
    cause = caught.value.__cause__
    assert cause is not None
    assert "user callback broke on purpose" in str(getattr(cause, "traceback", ""))
    assert getattr(cause, "rank", None) == 1
    assert "java" not in caught.value.message.lower()


def test_callbacks_decide_alike_on_all_ranks(spark: SparkSession, table: str, tmp_path: Path) -> None:
    result = fit(spark, table, tmp_path / "run", epochs=6, callbacks=models.stop_early(2))
    assert result.epochs == 3


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("build_uncompiled", "is not compiled"),
        ("build_no_model", "returned dict, not a keras.Model"),
        ("build_absent", "has no function 'build_absent'"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_and_leaves_nothing(
    spark: SparkSession, table: str, tmp_path: Path, model: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        fit(spark, table, tmp_path / "run", model=f"{MODELS}:{model}")
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert not (tmp_path / "run").exists()


def test_bad_input_is_refused_before_launch_and_leaves_nothing(spark: SparkSession, table: str, tmp_path: Path) -> None:
    def refused(said: str, **options: Any) -> None:
        with pytest.raises(InputError, match=said) as caught:
            fit(spark, options.pop("table", table), tmp_path / "run", **options)
        assert caught.value.exit_code == 2
        assert not (tmp_path / "run").exists()

    few = tmp_path / "few"
    few.mkdir()
    pq.write_table(pa.table({"a": [1.0], "b": [1.0], "label": [1]}), few / "wrong-type.parquet")
    with pytest.raises(SchemaError, match=r"column 'a' has type double; .* asks for float"):
        fit(spark, str(few), tmp_path / "run")
    one = pa.table(
        {"a": pa.array([1.0], pa.float32()), "b": pa.array([1.0], pa.float32()), "label": pa.array([1], pa.int32())}
    )
    pq.write_table(one, few / "wrong-type.parquet")
    refused("2 workers need at least 2 rows; the table has 1", table=str(few))
    pq.write_table(one.drop_columns(["b"]), few / "wrong-type.parquet")
    refused("has no column 'b'", table=str(few))
    (few / "wrong-type.parquet").write_bytes(b"no parquet at all")
    refused("wrong-type.parquet is not a complete Parquet file", table=str(few))
    pq.write_table(one[:0], few / "wrong-type.parquet")
    refused("has no rows", table=str(few))
    refused("there is no table", table=str(tmp_path / "nowhere"))
    refused("4 workers|num_workers=4|slots", num_workers=4)
    refused("strategy 'allreduse' is unknown", sync="allreduse")
    refused("smaller than num_workers", global_batch_size=1)
    with pytest.raises(InputError, match="matches no rows"):
        Trainer(model="x:y", checkpoint_dir=str(tmp_path / "run")).fit(
            spark, open_table(table).where("a > 1000000"), schema=SCHEMA
        )
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        fit(spark, table, blocked / "run")


def test_the_published_file_loads_in_plain_keras(undisturbed: TrainingResult) -> None:
    code = (
        "import keras, sys\n"
        f"model = keras.models.load_model({undisturbed.model_path!r})\n"
        "print(type(model.optimizer).__name__, int(model.optimizer.iterations.numpy()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=REPOSITORY
    )
    assert done.stdout.split() == ["Adam", "34"]
