"""Evaluate, publish, roll back, score and report as the nightly run calls them."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dl_on_spark.config import GateConfig, PipelineConfig
from dl_on_spark.errors import ConfigError, GateRefused, InputError
from dl_on_spark.jobs import evaluate, models, publish, report, score
from dl_on_spark.jobs.days import DaySplit, run_folder
from dl_on_spark.lake import open_table
from dl_on_spark.registry import Registry, SavedModel
from dl_on_spark.registry.sample import sample, scored_sample
from dl_on_spark.training import TrainingResult
from tests.registry.saved_models import linear, save_run, write_day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = datetime.date(2024, 1, 2)
X = [-3.0, -1.0, 0.0, 1.0, 2.0, 4.0]


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    """A pipeline whose table has one training day, one held-out day and a day to score."""
    for day, labels in (("2024-01-01", [0, 0, 0, 1, 0, 1]), ("2024-01-02", [0, 0, 1, 0, 1, 1]), ("2024-01-03", None)):
        write_day(tmp_path / "tables" / "features", day, X, labels)
    return PipelineConfig.model_validate(
        {
            "name": "clicks",
            "lake": str(tmp_path),
            "schema": "unused.yaml",
            "etl": {"transform": "m:f", "sources": {}},
            "training": {"model": "m:f", "days": 1, "holdout_days": 1},
            "gate": {"metric": "auc", "floor": 0.7},
        }
    )


def _run(spark: SparkSession, config: PipelineConfig, name: str, weight: float, *, evaluated: bool = True) -> Path:
    folder = Path(run_folder(config, DAY, name))
    table = Path(config.data_path(config.etl.table))
    where = DaySplit.of(config, DAY).training_filter(config.date_column)
    save_run(spark, folder, table, where, lambda: linear(weight))
    if evaluated:
        evaluate.run(spark, config, DAY, run_name=name, quiet=True)
    return folder


def test_a_night_from_evaluation_to_scores(spark: SparkSession, config: PipelineConfig) -> None:
    folder = _run(spark, config, "good", 1.0)
    written = json.loads((folder / "metrics.json").read_text())
    assert written["auc"] == pytest.approx(8 / 9) and written["rows"] == 6
    first = publish.run(spark, config, DAY, run_name="good", quiet=True)
    assert publish.run(spark, config, DAY, run_name="good", quiet=True)["version"] == first["version"] == 1
    names = {path.name for path in Path(first["folder"]).iterdir()}
    assert names == {"model.keras", "schema.yaml", "statistics.json", "metrics.json", "profile.json", "lineage.json"}
    lineage = json.loads((Path(first["folder"]) / "lineage.json").read_text())
    assert lineage["run"] == str(folder) and lineage["judged_on"] == written["snapshot"]
    tomorrow = DAY + datetime.timedelta(days=1)
    scored = score.run(spark, config, tomorrow, quiet=True)
    assert scored["rows"] == 6 and scored["model_version"] == 1
    assert open_table(config.data_path(config.scoring.table)).snapshot().rows == 6


def test_the_gate_refuses_with_all_reasons_and_force_is_recorded(spark: SparkSession, config: PipelineConfig) -> None:
    _run(spark, config, "good", 1.0)
    publish.run(spark, config, DAY, run_name="good", quiet=True)
    _run(spark, config, "bad", -1.0)
    with pytest.raises(GateRefused, match=r"at least 0\.7000.*constant rate.*current model") as refused:
        publish.run(spark, config, DAY, run_name="bad", quiet=True)
    assert refused.value.exit_code == 3
    registry = Registry(config.data_path(config.registry), config.name)
    current = registry.current()
    assert current is not None and current.number == 1
    forced = publish.run(spark, config, DAY, run_name="bad", force_reason="the label was redefined", quiet=True)
    assert (forced["version"], forced["previous"], forced["forced"]) == (2, 1, "the label was redefined")
    assert registry.versions()[-1].lineage["forced"] == "the label was redefined"
    assert models.moved(config, None, None)["version"] == 1


def test_another_question_to_the_gate_is_answered_when_publishing(spark: SparkSession, config: PipelineConfig) -> None:
    _run(spark, config, "good", 1.0)
    publish.run(spark, config, DAY, run_name="good", quiet=True)
    folder = _run(spark, config, "bad", -1.0)
    written = json.loads((folder / "metrics.json").read_text())
    assert written["comparison"]["version"] == 1 and set(written["drift"]) == {"x", "word"}
    asked = {"floor": 0.0, "tolerance": 1.0, "min_gain_over_baseline": -1.0, "slices": ("word",), "min_slice_rows": 1}
    sliced = config.model_copy(update={"gate": GateConfig.model_validate(asked)})
    with pytest.raises(GateRefused, match=r"word=b \(2 rows\): auc 0\.0000 is 1\.0000 worse"):
        publish.run(spark, sliced, DAY, run_name="bad", quiet=True)
    sliced = config.model_copy(update={"gate": GateConfig.model_validate({**asked, "max_slice_loss": 1.0})})
    done = publish.run(spark, sliced, DAY, run_name="bad", quiet=True)
    lineage = json.loads((Path(done["folder"]) / "lineage.json").read_text())
    assert lineage["judged_against"] == 1 and {check["what"] for check in lineage["checks"]} >= {"slices", "floor"}
    written = json.loads((Path(done["folder"]) / "metrics.json").read_text())
    assert [one["value"] for one in written["comparison"]["slices"]] == ["b"]  # the others are of one class
    wrong = config.model_copy(update={"gate": GateConfig(slices=("wrd",))})
    with pytest.raises(ConfigError, match=r"gate\.slices.*no column 'wrd'"):
        evaluate.run(spark, wrong, DAY, run_name="bad", quiet=True)


def test_a_sample_is_the_same_rows_for_two_models(spark: SparkSession, config: PipelineConfig) -> None:
    write_day(Path(config.data_path(config.etl.table)), "2024-01-02", X * 100, [0, 1] * 300, group=50)
    models = [SavedModel.load(str(_run(spark, config, f"run{w}", w, evaluated=False))) for w in (1.0, -1.0)]
    snapshot = evaluate.held_out(config, DAY).snapshot()
    (rows, scores), (same, others) = (scored_sample(spark, model, snapshot, ["id", "y"], 150) for model in models)
    assert rows.equals(same) and 100 < rows.num_rows < 200 and rows.column("id").to_pylist() != list(range(150))
    assert scores + others == pytest.approx(1, abs=1e-6)
    assert sample(spark, snapshot, ["id", "y"], 150).equals(rows)


def test_metrics_of_an_earlier_training_of_the_folder_are_not_taken(
    spark: SparkSession, config: PipelineConfig
) -> None:
    _run(spark, config, "again", 1.0)
    _run(spark, config, "again", -1.0, evaluated=False)
    with pytest.raises(InputError, match=r"trained again.*Run the evaluate job again"):
        publish.run(spark, config, DAY, run_name="again", quiet=True)


def test_candidate_and_current_are_compared_on_the_same_rows_only(spark: SparkSession, config: PipelineConfig) -> None:
    _run(spark, config, "good", 1.0)
    publish.run(spark, config, DAY, run_name="good", quiet=True)
    _run(spark, config, "better", 2.0)
    write_day(Path(config.data_path(config.etl.table)), "2024-01-02", X[:4], [1, 0, 1, 0])
    with pytest.raises(InputError, match=r"held-out rows .* changed.*Run the evaluate job again"):
        publish.run(spark, config, DAY, run_name="better", quiet=True)


def test_held_out_days_of_one_class_are_evaluated_and_the_gate_says_why_not(
    spark: SparkSession, config: PipelineConfig
) -> None:
    write_day(Path(config.data_path(config.etl.table)), "2024-01-02", X, [0] * 6)
    folder = _run(spark, config, "good", 1.0)
    written = json.loads((folder / "metrics.json").read_text())
    assert written["auc"] is None and written["log_loss"] > 0
    with pytest.raises(InputError, match=r"one class only.*Hold out more days"):
        publish.run(spark, config, DAY, run_name="good", force_reason="no", quiet=True)
    assert Registry(config.data_path(config.registry), config.name).versions() == []


def test_what_was_not_done_yet_is_named(spark: SparkSession, config: PipelineConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Run the training job first"):
        evaluate.run(spark, config, DAY, run_name="none", quiet=True)
    with pytest.raises(InputError, match="Run the publish job first"):
        score.run(spark, config, DAY, quiet=True)
    _run(spark, config, "good", 1.0, evaluated=False)
    with pytest.raises(InputError, match="Run the evaluate job first"):
        publish.run(spark, config, DAY, run_name="good", quiet=True)
    with pytest.raises(InputError, match="no version yet"):
        models.moved(config, None, None)
    with pytest.raises(InputError, match=r"holds no result\.json.*Run the training job first"):
        report.write(tmp_path / "r.html", config, DAY, runs=[run_folder(config, DAY, "good")], names=["good"])


def test_the_report_shows_each_run_beside_the_single_process(
    spark: SparkSession, config: PipelineConfig, tmp_path: Path
) -> None:
    history = {"loss": [0.7, 0.6], "val_loss": [0.71, 0.65], "auc": [0.6, 0.7], "val_auc": [0.6, 0.65]}
    runs = [_run(spark, config, "allreduce", 1.0), _run(spark, config, "local", 0.5)]
    for folder, sync in zip(runs, ("allreduce", "local_sgd:every=16"), strict=True):
        (folder / "run.json").write_text(json.dumps({"identity": {"sync": sync}}))
        result = TrainingResult(history, {"loss": 0.6}, "model.keras", str(folder), 1234.0, 10**6, 0, 20, 2, 2, 6, 1.0)
        (folder / "result.json").write_text(result.to_json())
    alone = _run(spark, config, "alone", 1.5)
    (alone / "single_process.json").write_text(json.dumps({"rows_per_second": 999.0, "history": history}))
    page = tmp_path / "report.html"
    names = ["allreduce", "local_sgd:every=16"]
    report.write(page, config, DAY, runs=[str(run) for run in runs], names=names, single_process=str(alone))
    html = page.read_text()
    for expected in (
        *names,
        "single process",
        "constant rate",
        "1,234",
        "999",
        "2024-01-02",
        "--start-date 2024-01-01",
        "training.sync=local_sgd:every=16",
        "Gate: allreduce",
    ):
        assert expected in html, expected


def test_the_drivers_jobs_do_not_import_tensorflow() -> None:
    code = (
        "import sys; from dl_on_spark.jobs import evaluate, models, publish, score, report; "
        "print([m for m in ('tensorflow', 'keras') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
