"""`StageAveraging` on real Spark: local SGD's history, whatever tasks, executors or the driver go through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dl_on_spark import LocalSGD, StageAveraging, TrainingResult, open_table
from dl_on_spark.errors import ConfigError, TrainingFailed
from dl_on_spark.sync import Nesterov, parse_sync
from dl_on_spark.sync.tree_sum import after_round, combine
from tests.cluster import REPOSITORY, StandaloneCluster, spark_environment
from tests.training import models
from tests.training.small_runs import assert_same_history, assert_same_weights, fit, write_table
from tests.training.stage_run import OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = {
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "OFF",
}
# Nothing of this goes with a barrier stage.
ELASTIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.3",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "3s",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "OFF",
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_table(tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, table: str, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """Three replicas on two slots."""
    return fit(spark, table, tmp_path_factory.mktemp("undisturbed") / "run", **OPTIONS)


def drive(table: str, folder: Path, conf: dict[str, str], disturb: str) -> subprocess.CompletedProcess[str]:
    options = json.dumps({"table": table, "folder": str(folder), "conf": conf, "disturb": disturb})
    return subprocess.run(
        [sys.executable, "-m", "tests.training.stage_run", options],
        env=spark_environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def result_of(folder: Path) -> TrainingResult:
    return TrainingResult.from_json(Path(folder, "run", "result.json").read_text())


def test_stages_have_the_history_of_local_sgd_on_workers_that_stay(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    outer = Nesterov(0.7, 0.9)
    options: dict[str, Any] = {"validation": open_table(table), "callbacks": models.lower_rate()}
    local = fit(spark, table, tmp_path / "local", sync=LocalSGD(every=5, outer=outer), **options)
    staged = fit(spark, table, tmp_path / "staged", sync=StageAveraging(every=5, outer=outer), **options)
    assert local.history.keys() == staged.history.keys() >= {"loss", "auc", "val_loss", "val_auc"}
    for name, values in local.history.items():
        np.testing.assert_allclose(staged.history[name], values, rtol=1e-5, err_msg=name)
    assert (staged.steps, staged.epochs, staged.restarts) == (local.steps, local.epochs, 0)
    assert staged.bytes_sent > 0
    first = staged.seconds_by_rank[0]
    assert sum(first[part] for part in ("input", "compute", "exchange", "waiting")) == pytest.approx(staged.seconds)
    assert Path(staged.model_path).is_file()
    again = fit(spark, table, tmp_path / "staged", sync=StageAveraging(every=5, outer=outer), **options)
    assert again == staged


def test_a_users_error_in_a_stage_is_the_first_thing_shown_and_ends_the_run(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed) as caught:
        fit(spark, table, tmp_path / "run", sync="stage_averaging", callbacks=models.raise_at_an_epochs_end())
    assert "user callback broke on purpose" in caught.value.message
    assert "user callback broke on purpose" in str(getattr(caught.value.__cause__, "traceback", ""))
    with pytest.raises(ConfigError, match="between epochs only; Fail has on_train_batch_end"):
        fit(spark, table, tmp_path / "refused", sync="stage_averaging", callbacks=models.raise_on_rank(1))
    assert not (tmp_path / "refused").exists()


@pytest.mark.faults
def test_a_run_whose_driver_was_killed_goes_on_as_if_undisturbed(
    spark: SparkSession, table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    done = drive(table, tmp_path, LOCAL, "driver")
    assert done.returncode == -9, done.stderr[-3000:]
    resumed = fit(spark, table, tmp_path / "run", **OPTIONS, resume="must")
    assert_same_weights(undisturbed, resumed, 0.0)
    assert_same_history(undisturbed, resumed)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["resume_from"] for e in events if e["event"] == "attempt"] == [None, "step-00000017-a001"]


@pytest.mark.faults
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_killed_tasks_lost_executors_and_second_attempts_leave_the_weights_of_an_undisturbed_run(
    table: str, tmp_path: Path, undisturbed: TrainingResult
) -> None:
    # Spark starts a second attempt on another host only.
    with StandaloneCluster(tmp_path / "cluster", hosts=["127.0.0.1", "127.0.0.2"]) as cluster:
        done = drive(table, tmp_path, {**ELASTIC, "spark.master": cluster.master_url}, "tasks")
    assert done.returncode == 0, done.stderr[-5000:]
    happened = {"trainer", "python-worker", "executor", "attempt-1", "attempt-2"}
    assert happened <= {file.name for file in tmp_path.iterdir()}
    result = result_of(tmp_path)
    assert result.restarts == 0
    assert_same_weights(undisturbed, result, 0.0)
    assert_same_history(undisturbed, result)


def test_a_tree_of_sums_is_the_sum_of_all_parts() -> None:
    rng = np.random.default_rng(0)
    parts = [
        {"trained/weight/0": rng.normal(size=3), "sum/0": np.ones(2), "stack/1": np.full((1, 2), k)} for k in range(5)
    ]
    total = combine([combine(parts[:3]), combine(parts[3:])])
    np.testing.assert_allclose(total["trained/weight/0"], sum(part["trained/weight/0"] for part in parts))
    assert total["stack/1"].tolist() == [[k, k] for k in range(5)]
    before = {"weight/0": np.zeros(3, np.float32), "rate": np.array(0.1), "metric/0": np.zeros(2)}
    after = after_round({**total, "first/weight/1": np.array(3)}, {**before, "weight/1": np.array(2)}, None)
    assert after["weight/0"].dtype == np.float32
    assert (after["weight/1"], after["metric/0"].tolist(), float(after["rate"])) == (3, [5.0, 5.0], 0.1)


@pytest.mark.parametrize("text", ["stage_averaging", "stage_averaging:every=8,outer=nesterov(0.7,0.9)"])
def test_the_text_of_the_strategy_is_read_back(text: str) -> None:
    assert str(parse_sync(text)) == text
    with pytest.raises(ConfigError, match="every=0"):
        StageAveraging(every=0)
