"""Scoring: one score a row, with what was saved beside the model and nothing of today's table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.lake import RowGroupDecoder, Schema, open_table
from dl_on_spark.launch.barrier import input_error
from dl_on_spark.registry import SavedModel
from dl_on_spark.scoring import ScoreReport, score
from tests.registry.saved_models import SCHEMA_YAML, expected_scores, linear, save_run, write_day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRAIN_X = [1.0, 2.0, 3.0, 6.0]
MEAN, STD = float(np.mean(TRAIN_X)), float(np.std(TRAIN_X))


@pytest.fixture
def model(spark: SparkSession, tmp_path: Path) -> SavedModel:
    write_day(tmp_path / "table", "2024-01-01", TRAIN_X, [0, 1, 0, 0])
    save_run(spark, tmp_path / "version", tmp_path / "table", "date = '2024-01-01'", linear)
    return SavedModel.load(str(tmp_path / "version"))


def _score(spark: SparkSession, model: SavedModel, tmp_path: Path, where: str, **options: Any) -> ScoreReport:
    return score(spark, model, 3, open_table(tmp_path / "table").where(where), str(tmp_path / "scores"), **options)


def _scores(tmp_path: Path) -> list[dict[str, Any]]:
    snapshot = open_table(tmp_path / "scores").snapshot()
    with RowGroupDecoder(snapshot) as decoder:
        return [row for i in range(snapshot.num_row_groups) for row in decoder.decode(i).to_pylist()]


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_each_row_has_one_score_whatever_the_batch(
    spark: SparkSession, model: SavedModel, tmp_path: Path, batch_rows: int
) -> None:
    x = [100.0, 200.0, -3.0, 4.0, 5.0, 6.0, 7.0]  # row groups of 3, 3 and 1: the last batch holds one row
    write_day(tmp_path / "table", "2024-01-02", x, [None] * 7, first_id=10)
    report = _score(spark, model, tmp_path, "date = '2024-01-02'", batch_rows=batch_rows)
    rows = _scores(tmp_path)
    assert report.rows == len(rows) == 7
    assert [row["id"] for row in rows] == list(range(10, 17))
    assert [row["score"] for row in rows] == pytest.approx(expected_scores(x, MEAN, STD), rel=1e-5)
    assert {(row["model_version"], str(row["date"])) for row in rows} == {(3, "2024-01-02")}
    assert set(rows[0]) == {"id", "score", "model_version", "date"}
    assert report.mean_score == pytest.approx(np.mean([row["score"] for row in rows]))


def test_scores_are_in_the_order_of_the_keys(spark: SparkSession, model: SavedModel, tmp_path: Path) -> None:
    folder = tmp_path / "table" / "date=2024-01-02"
    folder.mkdir()
    ids = [9, 2, 7, 4, 5, 0, 3, 8]
    for number, part in enumerate((ids[:5], ids[5:])):
        columns = {"id": pa.array(part, pa.int64()), "x": [float(i) for i in part], "word": ["a"] * len(part)}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=2)
    _score(spark, model, tmp_path, "date = '2024-01-02'")
    rows = _scores(tmp_path)
    assert [row["id"] for row in rows] == sorted(ids)
    assert [row["score"] for row in rows] == pytest.approx(expected_scores(sorted(ids), MEAN, STD), rel=1e-5)


def test_a_model_with_two_outputs_is_refused(spark: SparkSession, model: SavedModel, tmp_path: Path) -> None:
    save_run(spark, tmp_path / "two", tmp_path / "table", "date = '2024-01-01'", lambda: linear(outputs=2))
    with pytest.raises(PythonException) as raised:
        _score(spark, SavedModel.load(str(tmp_path / "two")), tmp_path, "date = '2024-01-01'")
    told = input_error(raised.value)
    assert told is not None and told.exit_code == 2 and "2,) numbers a row" in told.message
    assert not list((tmp_path / "scores").rglob("*.parquet"))


def test_a_day_without_a_label_column_is_scored(spark: SparkSession, model: SavedModel, tmp_path: Path) -> None:
    write_day(tmp_path / "unlabelled", "2024-01-02", [1.0, 2.0], None)
    report = score(spark, model, 1, open_table(tmp_path / "unlabelled"), str(tmp_path / "scores"))
    assert report.rows == 2


def test_nulls_follow_the_models_policy(spark: SparkSession, model: SavedModel, tmp_path: Path) -> None:
    write_day(tmp_path / "table", "2024-01-02", [None, 5.0], [None, None])
    _score(spark, model, tmp_path, "date = '2024-01-02'")
    assert [row["score"] for row in _scores(tmp_path)] == pytest.approx(
        expected_scores([0.0, 5.0], MEAN, STD), rel=1e-5
    )


def test_row_groups_that_the_filter_empties_give_no_rows(
    spark: SparkSession, model: SavedModel, tmp_path: Path
) -> None:
    write_day(tmp_path / "table", "2024-01-02", [1.0, 9.0, 1.0, 2.0, 3.0, 4.0], None)
    report = _score(spark, model, tmp_path, "date = '2024-01-02' and x > 8")
    assert report.rows == len(_scores(tmp_path)) == 1


def test_scoring_a_day_again_replaces_it_and_leaves_the_others(
    spark: SparkSession, model: SavedModel, tmp_path: Path
) -> None:
    write_day(tmp_path / "table", "2024-01-02", [1.0, 2.0], [None, None])
    for where in ("date >= '2024-01-01'", "date = '2024-01-02'", "date = '2024-01-02'"):
        _score(spark, model, tmp_path, where)
    assert sorted(str(row["date"]) for row in _scores(tmp_path)) == ["2024-01-01"] * 4 + ["2024-01-02"] * 2


def test_what_cannot_be_scored_says_why_and_writes_nothing(
    spark: SparkSession, model: SavedModel, tmp_path: Path
) -> None:
    with pytest.raises(TableError, match="matches no rows"):
        _score(spark, model, tmp_path, "date = '2030-01-01'")
    with pytest.raises(TableError, match="no column 'day'"):
        _score(spark, model, tmp_path, "date = '2024-01-01'", date_column="day")
    with pytest.raises(SchemaError, match="word"):
        without = open_table(tmp_path / "table").select(["id", "x", "date"])
        score(spark, model, 1, without, str(tmp_path / "scores"))
    assert not (tmp_path / "scores").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"), [("role: key", "role: feature", "no key"), ("  id:", "  score:", "'score'")]
)
def test_scores_that_could_not_be_told_apart_are_refused(
    spark: SparkSession, model: SavedModel, tmp_path: Path, old: str, new: str, said: str
) -> None:
    other = SavedModel(model.folder, Schema.from_yaml(SCHEMA_YAML.replace(old, new)), model.statistics, model.digest)
    with pytest.raises(SchemaError, match=said):
        _score(spark, other, tmp_path, "date = '2024-01-01'")
    assert not (tmp_path / "scores").exists()


def test_what_a_task_says_of_the_rows_is_an_input_error(spark: SparkSession, model: SavedModel, tmp_path: Path) -> None:
    strict = Schema.from_yaml(SCHEMA_YAML.replace(", nulls: {fill: 0}", ""))
    write_day(tmp_path / "table", "2024-01-02", [1.0, None], None)
    with pytest.raises(Exception, match="worker") as raised:
        _score(spark, SavedModel(model.folder, strict, model.statistics, model.digest), tmp_path, "date = '2024-01-02'")
    told = input_error(raised.value)
    assert told is not None and told.exit_code == 2
    assert "'x'" in told.message and "Traceback" not in told.message
    assert input_error(ValueError("dl_on_spark.errors.TrainingFailed: no")) is None
    assert not list((tmp_path / "scores").rglob("*.parquet"))


def test_a_model_file_that_changed_after_it_was_chosen_is_not_used(
    spark: SparkSession, model: SavedModel, tmp_path: Path
) -> None:
    linear(2.0, 0.125).save(tmp_path / "version" / "model.keras")
    with pytest.raises(PythonException, match="changed while it was read"):
        _score(spark, model, tmp_path, "date = '2024-01-01'")
    assert not (tmp_path / "scores").exists()


def test_nan_is_scored_as_a_null_and_an_infinite_value_is_refused_by_file(
    spark: SparkSession, model: SavedModel, tmp_path: Path
) -> None:
    write_day(tmp_path / "table", "2024-01-02", [1.0, float("nan"), None], None)
    _score(spark, model, tmp_path, "date = '2024-01-02'")
    scores = [row["score"] for row in _scores(tmp_path)]
    assert scores == pytest.approx(expected_scores([1.0, 0.0, 0.0], MEAN, STD), rel=1e-5)
    write_day(tmp_path / "table", "2024-01-02", [1.0, float("inf")], None)
    with pytest.raises(PythonException) as raised:
        _score(spark, model, tmp_path, "date = '2024-01-02'")
    told = input_error(raised.value)
    assert told is not None and "Column 'x' of date=2024-01-02/part-00000.parquet, row group 0" in told.message
    assert "1 infinite values" in told.message
    assert [row["score"] for row in _scores(tmp_path)] == scores
