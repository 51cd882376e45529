"""`Trainer.fit` on a real Spark session: right weights, right metrics, resumed runs, clear refusals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.leftovers import nothing_left
from dl_on_spark import LocalSGD, Trainer, TrainingResult, open_table
from dl_on_spark.errors import InputError, SchemaError, TrainingFailed
from dl_on_spark.input_pipeline import Cursor, SamplePlan
from dl_on_spark.input_pipeline.batch_sources import batch_rows
from dl_on_spark.lake import RowGroups, Snapshot
from dl_on_spark.sync import Nesterov
from dl_on_spark.training.run_folder import RunFolder
from dl_on_spark.training.run_lock import RunLock
from dl_on_spark.training.trainer import _split as split
from tests.cluster import REPOSITORY, spark_environment
from tests.training import models
from tests.training.small_runs import (
    MODELS,
    ROWS,
    SCHEMA,
    assert_same_history,
    assert_same_weights,
    fit,
    write_table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_table(tmp_path_factory.mktemp("table"))


def attempts(run_dir: str | Path) -> list[str | None]:
    """What each attempt resumed from."""
    events = [json.loads(line) for line in Path(run_dir, "events.jsonl").read_text().splitlines()]
    return [event["resume_from"] for event in events if event["event"] == "attempt"]


def contents(run_dir: str | Path) -> dict[str, bytes]:
    """All files of a run but the record of attempts."""
    files = [path for path in Path(run_dir).rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files if path.name not in {"events.jsonl", "attempt.json"}}


def assert_no_worker_is_left() -> None:
    """No worker runs, and what has ended is reaped by its parent in time."""
    ended = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.ZombieProcess:
            # Not the shell of spark-class: the JVM inherits and never reaps it, in any Spark program.
            if process.name().startswith("python"):
                ended.append(process)
        except psutil.NoSuchProcess:
            continue
        else:
            assert "launch.child" not in command, command
    _, unreaped = psutil.wait_procs(ended, timeout=20)
    assert not unreaped, [(process, process.parent()) for process in unreaped]


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
    for result, workers in ((alone, 1), (undisturbed, 2)):
        assert len(result.seconds_by_rank) == workers
        first = result.seconds_by_rank[0]
        parts = sum(first[part] for part in ("input", "compute", "exchange", "waiting"))
        assert parts == pytest.approx(result.seconds, rel=0.05)
        assert result.seconds > 0
        assert first["checkpoint"] > 0
        assert (first["exchange"] > 0) == (workers > 1)


@pytest.mark.faults
@pytest.mark.parametrize(
    "sync",
    [
        "allreduce",
        "allreduce:compress=topk(0.05)",
        LocalSGD(every=4, outer=Nesterov(0.7, 0.9)),
        "elastic_averaging:every=4",
        "parameter_server",
    ],
    ids=str,
)
def test_a_worker_killed_in_mid_epoch_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    spark: SparkSession, table: str, tmp_path: Path, sync: Any, undisturbed: TrainingResult
) -> None:
    options = {"sync": sync, "steps_per_execution": 2, "checkpoint_every": 6}
    if sync == "allreduce":  # its weights do not depend on where checkpoints are taken
        expected, options["validation"] = undisturbed, open_table(table)
    else:  # slots, dropout's random state, residuals, outer momentum and replicas differ from rank to rank
        options["model"] = f"{MODELS}:build_with_dropout_and_batch_norm"
        expected = fit(spark, table, tmp_path / "calm", **options)
    killer = models.kill_once(str(tmp_path / "killed"), rank_to_kill=1, step=9)
    result = fit(spark, table, tmp_path / "killed-run", callbacks=killer, **options)
    assert (tmp_path / "killed").exists()
    assert result.restarts == 1
    assert result.steps == expected.steps
    assert_same_weights(expected, result, 0.0)
    assert_same_history(expected, result)
    assert attempts(result.run_dir) == [None, "step-00000006-a001"]
    assert_no_worker_is_left()


@pytest.mark.faults
def test_a_run_whose_driver_was_killed_goes_on_when_it_is_submitted_again(
    spark: SparkSession, table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pyspark.sql import SparkSession\n"
        "from dl_on_spark import open_table\n"
        "from tests.training import models, test_trainer\n"
        "spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "table, run, mark = sys.argv[1:]\n"
        "stop = models.hang_at(mark, 9)\n"
        "options = {'validation': open_table(table), 'steps_per_execution': 2, 'checkpoint_every': 6}\n"
        "test_trainer.fit(spark, table, Path(run), callbacks=stop, deadline_s=600, **options)\n"
    )
    run, mark = tmp_path / "run", tmp_path / "mark"
    command = [sys.executable, "-c", script, table, str(run), str(mark)]
    with subprocess.Popen(command, env=spark_environment(), cwd=REPOSITORY, stderr=subprocess.DEVNULL) as driver:
        until = time.monotonic() + 200
        while not mark.exists() and driver.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert mark.exists() and len(family) >= 3
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    options = {"validation": open_table(table), "steps_per_execution": 2, "checkpoint_every": 6}
    result = fit(spark, table, run, resume="must", **options)
    assert attempts(run) == [None, "step-00000006-a001"]
    assert_same_weights(undisturbed, result, 0.0)
    assert not (run / "lock.json").exists()


def test_two_runs_at_once_in_one_session_do_not_disturb_each_other(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    with nothing_left(), ThreadPoolExecutor(2) as both:
        runs = [both.submit(fit, spark, table, tmp_path / name, num_workers=1, epochs=1) for name in ("one", "two")]
        first, second = (run.result() for run in runs)
    assert (first.run_dir, second.run_dir) == (str(tmp_path / "one"), str(tmp_path / "two"))
    assert first.steps == second.steps == 17
    assert_same_weights(first, second, 0.0)


@pytest.mark.faults
def test_an_asynchronous_run_goes_on_after_a_kill_and_applies_every_gradient_once(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    options = {"sync": "parameter_server:staleness=2", "steps_per_execution": 2, "checkpoint_every": 6}
    killer = models.kill_once(str(tmp_path / "killed"), rank_to_kill=1, step=9)
    result = fit(spark, table, tmp_path / "run", callbacks=killer, **options)
    assert result.restarts == 1
    assert result.steps == 2 * 17
    assert attempts(result.run_dir) == [None, "step-00000006-a001"]
    counted = [value for name, value in result.metrics.items() if name.removeprefix("staleness_").isdigit()]
    assert sum(counted) == 2 * result.steps
    assert result.metrics["staleness_max"] <= 4
    assert result.history["loss"][-1] < result.history["loss"][0]
    assert_no_worker_is_left()


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
    for name in ("result.json", "model.keras"):  # as if killed after the last step, before the model was saved
        Path(second.run_dir, name).unlink()
    saved = fit(spark, table, tmp_path / "run", epochs=2, validation=validation, resume="must")
    assert (saved.steps, saved.epochs) == (second.steps, second.epochs)
    assert Path(saved.model_path).is_file()
    assert_same_weights(second, saved, 0.0)
    assert_same_history(second, saved)


def test_a_run_goes_on_with_another_number_of_workers(
    spark: SparkSession, table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    validation = open_table(table)
    fit(spark, table, tmp_path / "run", epochs=1, validation=validation, num_workers=1)
    resumed = fit(spark, table, tmp_path / "run", epochs=2, validation=validation, num_workers=2, resume="must")
    assert_same_weights(undisturbed, resumed, 1e-4)


def test_large_batches_from_the_builder_to_the_noise_scale(spark: SparkSession, table: str, tmp_path: Path) -> None:
    options = {
        "model": f"{MODELS}:build_for_large_batches",
        "sync": "allreduce:noise_scale=true",
        "class_weight": {0: 1.0, 1: 2.5},
    }
    result = fit(spark, table, tmp_path / "run", **options)
    steps = -(-ROWS // 64)
    assert result.steps == 2 * steps // 3
    assert len(result.history["noise_scale"]) == 2
    assert 1 <= result.metrics["noise_scale"] <= ROWS
    again = fit(spark, table, tmp_path / "run", **options)
    assert again == result and len(attempts(tmp_path / "run")) == 1
    unweighted = fit(spark, table, tmp_path / "run", **{**options, "class_weight": None})
    assert unweighted.history["loss"][0] < 0.8 * result.history["loss"][0]
    assert attempts(tmp_path / "run") == [None, None]
    longer = fit(spark, table, tmp_path / "run", **{**options, "class_weight": None}, epochs=3)
    assert longer.steps == steps  # the sum of two batches is in the checkpoint between
    assert attempts(tmp_path / "run")[-1] is not None


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


def test_callbacks_decide_alike_on_all_ranks_and_a_run_they_stopped_is_finished(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    options = {"epochs": 6, "callbacks": models.stop_early(2)}
    result = fit(spark, table, tmp_path / "run", **options)
    assert result.epochs == 3
    assert fit(spark, table, tmp_path / "run", **options) == result
    assert attempts(result.run_dir) == [None]


@pytest.mark.faults
def test_a_trainer_whose_run_another_one_took_over_stops_and_leaves_it_alone(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(TrainingFailed, match="another trainer has taken over"):
        fit(spark, table, run, num_workers=1, callbacks=models.take_over(str(run)))
    assert json.loads((run / "attempt.json").read_text())["attempt"] == 2
    assert attempts(run) == [None]
    assert not list(run.glob("checkpoints/*/manifest.json"))
    assert not (run / "model.keras").exists()


def test_a_loss_that_is_no_number_ends_the_run_at_once_with_the_way_out(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed, match=r"training diverged: the loss is (nan|inf) from step \d+ on") as caught:
        fit(spark, table, tmp_path / "run", num_workers=1, model=f"{MODELS}:build_diverging")
    assert "learning rate" in str(caught.value.fix)
    assert attempts(tmp_path / "run") == [None]


@pytest.mark.faults
def test_a_row_that_makes_the_loss_no_number_is_traced_to_rank_step_and_row_group_and_good_checkpoints_stay(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    poisoned = tmp_path / "table"
    shutil.copytree(table, poisoned)
    rows = pq.read_table(poisoned / "part-4.parquet")
    b = rows["b"].to_numpy().copy()
    b[3 * 128 + 17] = -11
    rows = rows.set_column(1, "b", pa.array(b))
    pq.write_table(rows, poisoned / "part-4.parquet", row_group_size=128)
    run = tmp_path / "run"
    options = {"model": f"{MODELS}:build_with_logarithm", "checkpoint_every": 1, "epochs": 1}
    with pytest.raises(TrainingFailed, match="training diverged: the loss is nan") as caught:
        fit(spark, str(poisoned), run, **options)
    assert caught.value.exit_code == 4
    said = re.search(
        r"worker (\d) on 127.0.0.1 at step (\d+): .* from step (\d+) on .* rows \((.*)\)", caught.value.message
    )
    assert said is not None, caught.value.message
    rank, step, again, sources = int(said[1]), int(said[2]), int(said[3]), said[4]
    plan = SamplePlan.from_json(json.loads((run / "run.json").read_text())["plan"])
    snapshot = open_table(poisoned).snapshot()
    file = [one.path for one in snapshot.files].index("part-4.parquet")
    (group,) = np.flatnonzero((snapshot.row_groups.file == file) & (snapshot.row_groups.index == 3))
    place = [
        (r, s)
        for s in range(plan.steps_per_epoch)
        for r in (0, 1)
        if 17 in batch_rows(plan, Cursor(0, s), r, 2).get(int(group), [])
    ]
    assert (rank, step) == place[0] and again == step
    assert "part-4.parquet, row group 3" in sources
    assert attempts(run) == [None]
    steps = sorted(int(path.parent.name[5:13]) for path in run.glob("checkpoints/*/manifest.json"))
    assert steps == [s for s in range(step - 2, step + 1) if s > 0]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("build_uncompiled", "is not compiled"),
        ("build_failing", r"build_failing raised ValueError: the user's own mistake \(.*models\.py, line \d+\)"),
        ("build_no_model", "returned dict, not a keras.Model"),
        ("build_absent", "has no function 'build_absent'"),
        ("build_with_unknown_input", "has the input 'c', which is no feature of the schema"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_and_leaves_nothing(
    spark: SparkSession, table: str, tmp_path: Path, model: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        fit(spark, table, tmp_path / "run", model=f"{MODELS}:{model}", num_workers=1)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_the_one_that_it_would_have_replaced(
    spark: SparkSession, table: str, undisturbed: TrainingResult
) -> None:
    folder, before = Path(undisturbed.run_dir), contents(undisturbed.run_dir)
    with pytest.raises(InputError, match="is not compiled"):
        fit(spark, table, folder, model=f"{MODELS}:build_uncompiled", num_workers=1, resume="never")
    assert contents(folder) == before
    assert fit(spark, table, folder, validation=open_table(table)) == undisturbed


def test_a_run_that_another_trainer_is_at_work_on_is_left_alone(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with RunLock(RunFolder(str(run))):
        with pytest.raises(InputError, match="one run has one trainer") as caught:
            fit(spark, table, run)
        assert caught.value.exit_code == 2
        assert [path.name for path in run.iterdir()] == ["lock.json"]
    assert not run.exists()


def test_nulls_that_the_schema_refuses_are_found_before_anything_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    for column in ("a", "b", "label"):
        rows = {"a": [0.5, 1.0, 2.0], "b": [1.0, 0.5, 3.0], "label": [0, 1, 1]}
        rows[column][1] = None
        types = {"a": pa.float32(), "b": pa.float32(), "label": pa.int32()}
        folder = tmp_path / column
        folder.mkdir()
        pq.write_table(pa.table({n: pa.array(v, types[n]) for n, v in rows.items()}), folder / "part.parquet")
        with pytest.raises(SchemaError, match=f"column '{column}' has 1 nulls or NaN among 3 rows") as caught:
            fit(spark, str(folder), tmp_path / "run", global_batch_size=2)
        assert "nulls: indicator" in (caught.value.fix or "")
        assert not (tmp_path / "run").exists()


def test_a_damaged_page_is_named_before_anything_is_written(spark: SparkSession, table: str, tmp_path: Path) -> None:
    damaged = tmp_path / "table"
    shutil.copytree(table, damaged)
    file = damaged / "part-0.parquet"
    column = pq.read_metadata(file).row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(file.read_bytes())
    data[start : start + 60] = b"\xff" * 60
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"part-0\.parquet cannot be read"):
        fit(spark, str(damaged), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@given(rows=st.lists(st.integers(1, 50), min_size=2, max_size=40), share=st.floats(0.01, 0.99))
def test_a_held_out_share_is_whole_row_groups_that_training_does_not_see(rows: list[int], share: float) -> None:
    numbers = np.arange(len(rows))
    groups = RowGroups(numbers, numbers, np.array(rows), np.array(rows), numbers, np.array(rows))
    snapshot = Snapshot("table", "parquet", None, (), groups, pa.schema([]), None, None, "0" * 64)
    kept, held_out = split(snapshot, share)
    assert sorted([*kept.row_groups.file, *held_out.row_groups.file]) == list(numbers)
    assert min(kept.num_row_groups, held_out.num_row_groups) > 0
    assert abs(held_out.rows - share * sum(rows)) <= max(rows)
    assert len({part.fingerprint for part in (snapshot, kept, held_out)}) == 3
    assert split(snapshot, share)[1].fingerprint == held_out.fingerprint


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
    refused("alpha=0.8 with 2 workers", sync="elastic_averaging:alpha=0.8")
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
