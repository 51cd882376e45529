"""Evaluation on Spark: the saved model's own schema and statistics, exact or tallied."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dl_on_spark.errors import InputError, ModelError, TableError
from dl_on_spark.lake import Schema, open_table
from dl_on_spark.registry import Metrics, SavedModel, evaluate, predictions
from dl_on_spark.registry.metrics import area_under_curve, metrics_of
from tests.registry.saved_models import SCHEMA_YAML, expected_scores, linear, save_run, write_day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRAIN, TEST = "date = '2024-01-01'", "date = '2024-01-02'"
TRAIN_X, TEST_X = [1.0, 2.0, 3.0, 6.0], [10.0, -4.0, 3.0, 2.0, 5.0, 3.0, 0.5]
TEST_Y = [1, 0, 0, 1, 1, 1, 0]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "table of clicks"
    write_day(folder, "2024-01-01", TRAIN_X, [0, 1, 0, 0])
    write_day(folder, "2024-01-02", TEST_X, TEST_Y)
    return folder


def test_scores_are_those_of_the_training_rows_preprocessing(spark: SparkSession, tmp_path: Path, table: Path) -> None:
    save_run(spark, tmp_path / "run", table, TRAIN, linear)
    model = SavedModel.load(str(tmp_path / "run"))
    found = evaluate(spark, model, open_table(table).where(TEST))
    scores, truth = expected_scores(TEST_X, np.mean(TRAIN_X), np.std(TRAIN_X)), np.array(TEST_Y)
    assert found.rows == 7
    assert found.auc == pytest.approx(area_under_curve(truth, scores))
    assert found.mean_squared_error == pytest.approx(np.square(scores - truth).mean(), rel=1e-5)
    assert found.baseline_rate == 0.25
    assert found.baseline_log_loss == pytest.approx(-(4 * np.log(0.25) + 3 * np.log(0.75)) / 7)
    assert found.model == model.digest
    assert found.snapshot == open_table(table).where(TEST).snapshot().fingerprint


@pytest.mark.parametrize("exact_rows", [100, 0])
def test_words_nulls_and_a_filter_through_row_groups_are_as_in_training(
    spark: SparkSession, tmp_path: Path, table: Path, exact_rows: int
) -> None:
    schema = Schema.from_yaml(SCHEMA_YAML.replace("nulls: {fill: 0}", "nulls: indicator"))
    x: list[float | None] = [None, -4.0, 3.0, 2.0, None, 3.5, 0.5]
    for day, first_id in (("2024-01-03", 0), ("2024-01-04", 7)):
        write_day(table, day, x, TEST_Y, first_id=first_id)
    save_run(spark, tmp_path / "run", table, TRAIN, lambda: _of_all_inputs(schema), schema)
    rows = open_table(table).where("date > '2024-01-02' and id not in (1, 2, 7)")
    found = evaluate(spark, SavedModel.load(str(tmp_path / "run")), rows, exact_rows=exact_rows)

    kept = [i for i in range(14) if i not in (1, 2, 7)]
    missing = np.array([x[i % 7] is None for i in kept])
    value = np.array([x[i % 7] or 0.0 for i in kept])
    standardized = np.where(missing, 0, (value - np.mean(TRAIN_X)) / np.std(TRAIN_X))
    word = np.array([i % 7 % 3 for i in kept])  # a, b, unseen; of the training rows two are a, one b, one unseen
    logits = 0.7 * standardized - 1.3 * missing + np.array([-2.0, 1.25, 0.5])[word]
    expected = metrics_of(np.array([TEST_Y[i % 7] for i in kept]), 1 / (1 + np.exp(-logits)), 0.25)
    assert found.rows == expected.rows == 11
    assert found.auc == pytest.approx(expected.auc, abs=found.auc_error + 1e-9)
    assert found.log_loss == pytest.approx(expected.log_loss, rel=1e-5)
    assert found.mean_squared_error == pytest.approx(expected.mean_squared_error, rel=1e-5)


def _of_all_inputs(schema: Schema) -> Any:
    """sigmoid(0.7 x - 1.3 x_is_null + a number a word): unknown 0.5, a -2, b 1.25."""
    import keras

    inputs = schema.keras_inputs()
    numbers = [keras.layers.Reshape((1,))(inputs[name]) for name in ("x", "x_is_null")]
    embedding = keras.layers.Embedding(schema["word"].cardinality, 1)
    word = keras.layers.Reshape((1,))(embedding(keras.layers.Reshape((1,))(inputs["word"])))
    dense = keras.layers.Dense(1, activation="sigmoid")
    model = keras.Model(inputs, dense(keras.layers.Concatenate()([*numbers, word])))
    embedding.set_weights([np.array([[0.5], [-2.0], [1.25]])])
    dense.set_weights([np.array([[0.7], [-1.3], [1.0]]), np.zeros(1)])
    return model


def test_a_table_too_large_to_collect_gives_the_same_metrics(spark: SparkSession, tmp_path: Path, table: Path) -> None:
    save_run(spark, tmp_path / "run", table, TRAIN, linear)
    model, rows = SavedModel.load(str(tmp_path / "run")), open_table(table).where(TEST)
    exact, tallied = evaluate(spark, model, rows), evaluate(spark, model, rows, exact_rows=6)
    assert tallied.auc is not None and exact.auc is not None
    assert abs(tallied.auc - exact.auc) <= tallied.auc_error
    for name in ("rows", "snapshot", "model", "base_rate", "baseline_rate", "accuracy"):
        assert getattr(tallied, name) == getattr(exact, name), name
    assert tallied.log_loss == pytest.approx(exact.log_loss)
    assert len(tallied.calibration) == len(exact.calibration)


@pytest.mark.parametrize("exact_rows", [100, 0])
def test_a_model_that_diverged_is_refused(spark: SparkSession, tmp_path: Path, table: Path, exact_rows: int) -> None:
    save_run(spark, tmp_path / "run", table, TRAIN, lambda: linear(float("nan")))
    with pytest.raises(ModelError, match="not finite"):
        evaluate(spark, SavedModel.load(str(tmp_path / "run")), open_table(table).where(TEST), exact_rows=exact_rows)


@pytest.mark.parametrize("exact_rows", [100, 0])
def test_a_model_with_two_outputs_is_refused(spark: SparkSession, tmp_path: Path, table: Path, exact_rows: int) -> None:
    save_run(spark, tmp_path / "run", table, TRAIN, lambda: linear(outputs=2))
    with pytest.raises(ModelError, match="2 numbers a row"):
        evaluate(spark, SavedModel.load(str(tmp_path / "run")), open_table(table).where(TEST), exact_rows=exact_rows)


@pytest.mark.parametrize("exact_rows", [100, 0])
def test_null_labels_are_refused(spark: SparkSession, tmp_path: Path, table: Path, exact_rows: int) -> None:
    write_day(table, "2024-01-03", [1.0, 2.0], [1, None])
    save_run(spark, tmp_path / "run", table, TRAIN, linear)
    model = SavedModel.load(str(tmp_path / "run"))
    with pytest.raises(InputError, match="'y' has nulls"):
        evaluate(spark, model, open_table(table).where("date = '2024-01-03'"), exact_rows=exact_rows)


def test_a_day_without_rows_says_so(spark: SparkSession, tmp_path: Path, table: Path) -> None:
    save_run(spark, tmp_path / "run", table, TRAIN, linear)
    model = SavedModel.load(str(tmp_path / "run"))
    with pytest.raises(TableError, match="matches no rows"):
        evaluate(spark, model, open_table(table).where("date = '2030-01-01'"))


def test_what_tracing_a_model_leaves_in_the_folder_for_temporary_files_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with predictions._temporary_files_removed(), tempfile.NamedTemporaryFile(delete=False):
        pass
    assert tempfile.gettempdir() == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_model_says_train_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no finished model.*Run the training job first"):
        SavedModel.load(str(tmp_path))


@pytest.mark.parametrize("name", ["model.keras", "schema.yaml", "statistics.json"])
def test_a_damaged_file_of_a_model_is_named(spark: SparkSession, tmp_path: Path, table: Path, name: str) -> None:
    folder = tmp_path / "run"
    save_run(spark, folder, table, "date = '2024-01-01'", lambda: linear(1.0))
    (folder / name).write_text("{")
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        SavedModel.load(str(folder))


def test_damaged_metrics_ask_for_another_evaluation() -> None:
    for text in ("{", "[]", "{}"):
        with pytest.raises(InputError, match=r"metrics\.json is damaged"):
            Metrics.from_json(text)
