"""`KerasEstimator` and `KerasModel` as a user of pyspark.ml uses them, on a real Spark session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PythonException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F

from dl_on_spark import KerasEstimator, KerasModel, LocalSGD, Schema, Trainer, open_table
from dl_on_spark.errors import ConfigError, InputError, SchemaError
from dl_on_spark.launch.barrier import input_error
from dl_on_spark.ml.columns import schema_of
from dl_on_spark.ml.frames import in_place, tables_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 600
BUILDERS = "tests.ml.builders"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Parquet table: numbers, a text and a label that follows from them."""
    folder = tmp_path_factory.mktemp("plain table")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=ROWS), rng.integers(0, 5, ROWS).astype(np.int32)
    columns = {
        "id": np.arange(ROWS),
        "a": a,
        "b": b,
        "word": np.array(["red", "green", "blue"])[rng.integers(0, 3, ROWS)],
        "held_out": rng.random(ROWS) < 0.2,
        "label": (a + b > 2).astype(np.float64),
    }
    table = pa.table(columns)
    for number, (start, stop) in enumerate(((0, 100), (100, 350), (350, ROWS))):
        pq.write_table(table[start:stop], folder / f"part-{number}.parquet", row_group_size=64)
    return str(folder)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, folder: str) -> DataFrame:
    return spark.read.parquet(folder)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "the store"


def estimator(store: Path, model: str = "build_on_columns", **params: Any) -> KerasEstimator:
    small = {"globalBatchSize": 64, "epochs": 2, "numWorkers": 2, "seed": 3, "quiet": True, "storeDir": str(store)}
    return KerasEstimator(model=f"{BUILDERS}:{model}", **{**small, **params})


def assert_nothing_is_left(store: Path) -> None:
    assert not store.exists() or list(store.iterdir()) == []


@pytest.fixture(scope="module")
def fitted(rows: DataFrame, tmp_path_factory: pytest.TempPathFactory) -> KerasModel:
    """Trained in place, with validation rows."""
    store = tmp_path_factory.mktemp("store")
    made = estimator(store, featuresCols=["a", "b"], validationIndicatorCol="held_out")
    model = made.fit(rows)
    assert_nothing_is_left(store)
    return model


def test_a_plain_scan_trains_as_the_trainer_does_on_the_table(
    spark: SparkSession, folder: str, rows: DataFrame, fitted: KerasModel, tmp_path: Path
) -> None:
    schema = schema_of(rows, ["a", "b"], "label", None)
    table = open_table(folder)
    result = Trainer(f"{BUILDERS}:build_on_columns", num_workers=2, checkpoint_dir=str(tmp_path / "run")).fit(
        spark,
        table.where("held_out = false"),
        schema=schema,
        validation=table.where("held_out = true"),
        global_batch_size=64,
        epochs=2,
        seed=3,
        quiet=True,
    )
    import keras

    expected = keras.models.load_model(result.model_path).get_weights()
    for ours, theirs in zip(fitted.kerasModel().get_weights(), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert fitted.summary is not None and fitted.summary.history == result.history
    assert "val_loss" in result.history


def test_predictions_are_kerass_own_and_all_columns_stay(rows: DataFrame, fitted: KerasModel) -> None:
    more = rows.withColumn("map", F.create_map(F.lit("k"), F.col("b"))).withColumn("at", F.current_timestamp())
    scored = fitted.transform(more)
    assert scored.columns == [*more.columns, "prediction"]
    assert scored.schema["prediction"].dataType.simpleString() == "double"
    found = scored.orderBy("id").collect()
    assert all(row.map == {"k": row.b} and row.at is not None for row in found[:20])
    assert [row.word for row in found] == [row.word for row in rows.orderBy("id").collect()]
    inputs = {"a": np.array([r.a for r in found], np.float32), "b": np.array([r.b for r in found], np.int32)}
    expected = fitted.kerasModel().predict(inputs, verbose=0)[:, 0]
    np.testing.assert_allclose([row.prediction for row in found], expected, rtol=1e-5, atol=1e-6)


def test_empty_partitions_and_batches_of_one_row_are_scored(
    spark: SparkSession, rows: DataFrame, fitted: KerasModel
) -> None:
    few = rows.where("id < 3").repartition(7)
    whole = {row.id: row.prediction for row in fitted.transform(rows).collect()}
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 1)
    try:
        found = {row.id: row.prediction for row in fitted.transform(few).collect()}
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert found.keys() == {0, 1, 2}
    assert found == pytest.approx({key: whole[key] for key in found}, rel=1e-5)
    assert fitted.transform(rows.where("id < 0")).count() == 0


def test_a_null_is_refused_by_name_or_filled_as_the_schema_says(
    spark: SparkSession, rows: DataFrame, fitted: KerasModel, store: Path
) -> None:
    holes = rows.withColumn("a", F.when(F.col("id") == 5, None).otherwise(F.col("a")))
    with pytest.raises(PythonException) as raised:
        fitted.transform(holes).collect()
    told = input_error(raised.value)
    assert isinstance(told, SchemaError) and "Column 'a' of a batch of the DataFrame" in told.message
    with pytest.raises(SchemaError, match="column 'a' has 1 nulls"):
        estimator(store, featuresCols=["a", "b"]).fit(holes)
    assert_nothing_is_left(store)
    schema = Schema.from_dict(
        {
            "name": "filled",
            "fields": {
                "a": {"type": "double", "role": "feature", "dtype": "float32", "nulls": {"fill": 0}},
                "b": {"type": "int", "role": "feature"},
                "label": {"type": "double", "role": "label"},
            },
        }
    )
    made = estimator(store, schema=schema, epochs=1)
    by_schema = made.fit(holes)
    assert_nothing_is_left(store)
    zero = by_schema.transform(rows.where("id = 5").withColumn("a", F.lit(0.0))).collect()[0].prediction
    assert by_schema.transform(holes.where("id = 5")).collect()[0].prediction == pytest.approx(zero)


def test_a_pipeline_with_sparks_stages_is_fitted_saved_and_read(rows: DataFrame, store: Path, tmp_path: Path) -> None:
    stages = [
        StringIndexer(inputCol="word", outputCol="word_index"),
        VectorAssembler(inputCols=["a", "b", "word_index"], outputCol="features"),
        estimator(store, "build_on_vector", probabilityCol="probability", epochs=6, sync=LocalSGD(every=4)),
    ]
    pipeline = Pipeline(stages=stages)
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    again = Pipeline.load(str(tmp_path / "pipeline"))
    assert again.getStages()[2].getSync() == "local_sgd:every=4" and again.getStages()[2].getEpochs() == 6
    fitted = again.fit(rows)
    assert_nothing_is_left(store)
    scored = fitted.transform(rows)
    assert scored.schema["probability"].dataType == VectorUDT()
    for row in scored.limit(20).collect():
        assert row.probability.toArray().sum() == pytest.approx(1)
        assert row.prediction == row.probability.toArray().argmax()
    assert BinaryClassificationEvaluator(rawPredictionCol="probability").evaluate(scored) > 0.7
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored) > 0.6
    for _ in range(2):
        fitted.write().overwrite().save(str(tmp_path / "fitted model"))
    with pytest.raises(Exception, match=r"(?i)exist"):
        fitted.stages[2].save(str(tmp_path / "fitted model"))
    read = PipelineModel.load(str(tmp_path / "fitted model"))
    assert read.stages[2].uid == fitted.stages[2].uid and read.stages[2].summary == fitted.stages[2].summary
    before = [row.probability for row in scored.orderBy("id").collect()]
    assert [row.probability for row in read.transform(rows).orderBy("id").collect()] == before


def test_sparse_and_dense_vectors_and_several_classes(spark: SparkSession, store: Path) -> None:
    vectors = [Vectors.sparse(3, {i % 3: 1.0}) if i % 2 else Vectors.dense(np.eye(3)[i % 3]) for i in range(60)]
    rows = spark.createDataFrame([(v, i % 3) for i, v in enumerate(vectors)], ["features", "label"])
    model = estimator(store, "build_three_classes", epochs=1, numWorkers=1, predictionCol="scores").fit(rows)
    assert_nothing_is_left(store)
    found = model.transform(rows).collect()
    expected = model.kerasModel().predict({"features": np.array([v.toArray() for v in vectors])}, verbose=0)
    by_class = {row.label: row.scores for row in found}
    np.testing.assert_allclose([by_class[i] for i in range(3)], expected[:3], rtol=1e-4)
    assert model.copy({model.predictionCol: "other"}).transform(rows).columns[-1] == "other"


def test_cross_validation_with_two_folds_chooses_a_model(rows: DataFrame, store: Path) -> None:
    made = estimator(store, featuresCols=["a", "b"], epochs=1, numWorkers=1, labelCol="label")
    grid = ParamGridBuilder().addGrid(made.seed, [1]).build()
    judge = BinaryClassificationEvaluator(rawPredictionCol="prediction")
    found = CrossValidator(estimator=made, estimatorParamMaps=grid, evaluator=judge, numFolds=2, seed=1).fit(rows)
    assert_nothing_is_left(store)
    assert len(found.avgMetrics) == 1 and 0 <= found.avgMetrics[0] <= 1
    assert found.bestModel.transform(rows).count() == ROWS


def test_a_failing_fit_says_why_and_leaves_no_table(rows: DataFrame, store: Path) -> None:
    with pytest.raises(InputError, match="no such layer"):
        estimator(store, "build_failing", featuresCols=["a"]).fit(rows.where("id >= 0"))
    assert_nothing_is_left(store)


def test_only_a_plain_scan_is_read_in_place(spark: SparkSession, folder: str, rows: DataFrame) -> None:
    schema = schema_of(rows, ["a", "b"], "label", None)
    rows.createOrReplaceTempView("plain_rows")
    assert in_place(rows, schema) is not None and in_place(rows.alias("r"), schema) is not None
    others = [
        rows.where("id > 0"),
        rows.select("a", "b", "label"),
        rows.limit(5),
        rows.union(rows),
        rows.withColumn("a", F.lit(1.0)),
        spark.read.option("pathGlobFilter", "part-0*").parquet(folder),
        spark.read.parquet(f"{folder}/part-0.parquet", f"{folder}/part-1.parquet"),
    ]
    assert [in_place(other, schema) for other in others] == [None] * len(others)


def test_files_that_came_after_the_dataframe_are_not_trained_on(spark: SparkSession, tmp_path: Path) -> None:
    table = pa.table({"a": [1.0, 2.0], "label": [0.0, 1.0]})
    pq.write_table(table, tmp_path / "one.parquet")
    rows = spark.read.parquet(str(tmp_path))
    schema = schema_of(rows, ["a"], "label", None)
    assert in_place(rows, schema) is not None
    pq.write_table(table, tmp_path / "two.parquet")
    assert in_place(rows, schema) is None


def test_a_written_table_has_as_many_rows_for_each_worker(rows: DataFrame, tmp_path: Path) -> None:
    schema = schema_of(rows, ["a", "b"], "label", None)
    table, validation = tables_of(rows.where("id >= 0"), schema, None, str(tmp_path), 3)
    groups = table.snapshot().row_groups.rows
    assert validation is None and len(groups) == 9 and groups.sum() == ROWS
    assert groups.max() - groups.min() <= 3


def test_params_are_told_checked_and_copied(tmp_path: Path) -> None:
    made = KerasEstimator(model=f"{BUILDERS}:build_on_columns", numWorkers=2)
    told = made.explainParams()
    assert "globalBatchSize: rows of one optimizer step over all workers (default: 4096)" in told
    assert made.setEpochs(3).getEpochs() == 3 and made.copy({made.epochs: 5}).getEpochs() == 5
    assert made.getEpochs() == 3
    with pytest.raises(TypeError, match="numWorkers"):
        made.setParams(numWorkers="two")
    with pytest.raises(ConfigError, match="Did you mean"):
        made.setSync("local_sdg")
    with pytest.raises(TypeError, match="module:function"):
        made.setModel("no_function")
    with pytest.raises(ConfigError, match="not saved"):
        KerasEstimator(model=lambda: None).write()


def test_what_cannot_be_fitted_is_refused_by_name(rows: DataFrame, store: Path) -> None:
    with pytest.raises(ConfigError, match="needs storeDir"):
        KerasEstimator(model=f"{BUILDERS}:build_on_columns").fit(rows)
    with pytest.raises(SchemaError, match=r"no column 'lable'.*Did you mean 'label'"):
        estimator(store, featuresCols=["a"], labelCol="lable").fit(rows)
    with pytest.raises(ConfigError, match="both given"):
        estimator(store, featuresCols=["a"], featuresCol="b").fit(rows)
    with pytest.raises(InputError, match="no rows"):
        estimator(store, featuresCols=["a", "b"]).fit(rows.where("id < 0"))
    assert_nothing_is_left(store)


def test_a_column_that_is_there_already_is_not_replaced(rows: DataFrame, fitted: KerasModel) -> None:
    with pytest.raises(SchemaError, match="'prediction' already"):
        fitted.transform(rows.withColumn("prediction", F.lit(1)))
    with pytest.raises(SchemaError, match="no column 'b'"):
        fitted.transform(rows.drop("b"))
