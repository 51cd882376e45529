"""`KerasModel`: predictions beside all columns of a DataFrame, batch by batch in Arrow."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable

from dl_on_spark.errors import ModelError, SchemaError
from dl_on_spark.ml.params import OutputParams, with_accessors
from dl_on_spark.ml.persistence import KerasModelReader, KerasModelWriter
from dl_on_spark.registry.predictions import Outputs, SavedModel, predictor
from dl_on_spark.training import TrainingResult

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField

_TASK = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@with_accessors
class KerasModel(Model, OutputParams, MLReadable, MLWritable):  # type: ignore[misc]
    """A trained Keras model as a Transformer.

    ``transform`` keeps all columns and adds the model's output as ``predictionCol``: a double for one number a row,
    arrays of floats for several, a column ``predictionCol_NAME`` each for a model with several outputs. With
    ``probabilityCol`` it answers as pyspark.ml's classifiers do. Features are read by the names, types and null
    policies of training. ``summary``: metrics and history of the fit.
    """

    def __init__(
        self,
        saved: SavedModel | None = None,
        depths: dict[str, int] | None = None,
        summary: TrainingResult | None = None,
    ) -> None:
        super().__init__()
        self._saved = saved
        self._depths = depths or {}
        self.summary = summary

    @classmethod
    def of_run(cls, spark: SparkSession, result: TrainingResult) -> KerasModel:
        """The model of a finished run, which does not need the run's folder."""
        saved = SavedModel.load(result.run_dir).carrying_its_file()
        summary = replace(result, model_path="", run_dir="")
        return cls(replace(saved, folder="the fitted model"), _depths(spark, saved), summary)

    def kerasModel(self) -> keras.Model:
        """The `keras.Model` in this process, not compiled."""
        return self.saved.keras_model()

    @property
    def saved(self) -> SavedModel:
        """File, schema and statistics. Raises `ModelError` for a KerasModel that comes from no fit."""
        if self._saved is None:
            raise ModelError("this KerasModel holds no model.", fix="Use KerasEstimator.fit or KerasModel.load.")
        return self._saved

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql.types import StructType

        saved = self.saved
        features = [field.name for field in saved.schema.features]
        saved.schema.check(_arrow_schema(dataset, features), "the DataFrame", features)
        added = self._added()
        for field in added:
            if field.name in dataset.columns:
                raise SchemaError(
                    f"the DataFrame has a column {field.name!r} already.", fix="Set another predictionCol."
                )
        probability = self.getOrDefault("probabilityCol") if self.isDefined("probabilityCol") else None
        columns = _classes if probability else functools.partial(_plain, self._depths)
        task = _task(saved, [field.name for field in added], columns)
        return dataset.mapInArrow(task, StructType([*dataset.schema.fields, *added]))

    def _added(self) -> list[StructField]:
        """Names and types of the columns that `transform` adds."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StructField

        prediction = self.getOrDefault("predictionCol")
        if self.isDefined("probabilityCol") and self.getOrDefault("probabilityCol"):
            if list(self._depths) != [""] or self._depths[""] > 1:
                raise ModelError(
                    "probabilityCol needs a model with one output: one probability a row, or one for each class.",
                    fix="Leave probabilityCol out.",
                )
            return [
                StructField(self.getOrDefault("probabilityCol"), VectorUDT()),
                StructField(prediction, DoubleType()),
            ]
        fields = []
        for name, depth in self._depths.items():
            kind: DataType = FloatType() if depth else DoubleType()
            for _ in range(depth):
                kind = ArrayType(kind)
            fields.append(StructField(f"{prediction}_{name}" if name else prediction, kind))
        return fields

    def write(self) -> KerasModelWriter:
        """Writer of Params, Keras file, schema, statistics and summary; nothing in it is a pickle."""
        return KerasModelWriter(self)

    @classmethod
    def read(cls) -> KerasModelReader:
        """Reader of what `write` wrote. Keras's safe mode: no code in the file is run."""
        return KerasModelReader(cls)


def _depths(spark: SparkSession, saved: SavedModel) -> dict[str, int]:
    """Rank of each output, asked of a Python worker: this program need not load TensorFlow."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"depths": [json.dumps(predictor(saved).depths)]})

    found: dict[str, int] = json.loads(spark.range(0, 1, 1, 1).mapInArrow(task, "depths string").collect()[0][0])
    return found


def _arrow_schema(rows: DataFrame, names: list[str]) -> pa.Schema:
    """Arrow types of the columns that hold `names`, as Spark hands them to Python."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    columns = {name.split(".", maxsplit=1)[0] for name in names} | set(names)
    options = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(StructType([field for field in rows.schema if field.name in columns]), **options)


def _task(saved: SavedModel, names: list[str], columns: Callable[[Outputs], list[pa.Array]]) -> _TASK:
    features = [field.name for field in saved.schema.features]

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            table = pa.Table.from_batches([batch])
            outputs = predictor(saved)(_features(table, features), "a batch of the DataFrame")
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns(outputs)], names=[*batch.schema.names, *names])

    return task


def _features(table: pa.Table, names: list[str]) -> pa.Table:
    """The feature columns; a field of a struct by its dotted name."""
    from dl_on_spark.lake import nested

    found = {}
    for name in names:
        path = nested.path_of(table.schema, name)
        assert path is not None  # the driver has checked the DataFrame's schema
        found[name] = nested.column_of(table, path)
    return pa.table(found)


def _plain(depths: dict[str, int], outputs: Outputs) -> list[pa.Array]:
    """Each output as it is: doubles, or lists as deep as its rank."""
    return [
        pa.array(outputs[name], pa.float64()) if depth == 0 else _lists(outputs[name]) for name, depth in depths.items()
    ]


def _classes(outputs: Outputs) -> list[pa.Array]:
    """Probabilities of all classes as Spark ML vectors, and the most probable class."""
    from dl_on_spark.lake.ddl import VECTOR

    found = outputs[""].astype(np.float64)
    chances = np.stack([1 - found, found], axis=1) if found.ndim == 1 else found
    rows = len(chances)
    parts = [
        pa.array(np.ones(rows, np.int8)),
        pa.nulls(rows, pa.int32()),
        pa.nulls(rows, pa.list_(pa.int32())),
        _lists(chances),
    ]
    return [
        pa.StructArray.from_arrays(parts, names=[field.name for field in VECTOR]),
        pa.array(chances.argmax(axis=1).astype(np.float64)),
    ]


def _lists(values: Any) -> pa.Array:
    """An array of shape (rows, \\*shape) as nested lists."""
    found = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        outer = int(np.prod(values.shape[:axis]))
        found = pa.ListArray.from_arrays(np.arange(outer + 1, dtype=np.int32) * values.shape[axis], found)
    return found
