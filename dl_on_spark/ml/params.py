"""The Params of estimator and model, with what each accepts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from dl_on_spark.errors import ConfigError
from dl_on_spark.lake import Schema
from dl_on_spark.sync import SyncStrategy, parse_sync

_Kind = TypeVar("_Kind", bound=type[Any])


def with_accessors(kind: _Kind) -> _Kind:
    """Give a Params class ``getX`` and ``setX`` for each of its Params that has none yet, as pyspark.ml does."""
    for name in [name for name in dir(kind) if isinstance(getattr(kind, name), Param)]:
        capital = name[0].upper() + name[1:]

        def get(self: Any, name: str = name) -> Any:
            return self.getOrDefault(name)

        def put(self: Any, value: Any, name: str = name) -> Any:
            return self._set(**{name: value})

        for prefix, function in (("get", get), ("set", put)):
            if not hasattr(kind, prefix + capital):
                function.__name__ = prefix + capital
                function.__doc__ = f"{prefix.capitalize()}s the Param `{name}`."
                setattr(kind, prefix + capital, function)
    return kind


def _to_builder(value: str | Callable[..., Any]) -> str | Callable[..., Any]:
    if callable(value) or (isinstance(value, str) and ":" in value):
        return value
    raise TypeError(f'{value!r} is no "module:function" and no function')


def _to_sync(value: str | SyncStrategy) -> str | SyncStrategy:
    """The strategy's text, which persists; an object that has none stays as it is."""
    strategy = parse_sync(value)
    text = str(strategy)
    try:
        return text if parse_sync(text) == strategy else strategy
    except ConfigError:  # its text is for people only
        return strategy


def _to_schema(value: Any) -> str:
    """YAML text of a `Schema`, of a schema file's path, or as it is."""
    if isinstance(value, Schema):
        return value.to_yaml()
    if isinstance(value, str) and "\n" in value:
        return Schema.from_yaml(value).to_yaml()
    if isinstance(value, (str, os.PathLike)):
        return Schema.load(value).to_yaml()
    raise TypeError(f"{value!r} is no Schema and no path of one")


class OutputParams(HasPredictionCol):  # type: ignore[misc]
    """Where predictions go."""

    probabilityCol = Param(
        Params._dummy(),
        "probabilityCol",
        "column for a classifier's class probabilities, a vector. When set, the model's one output is taken as "
        "probabilities and predictionCol holds the index of the most probable class, as of pyspark.ml's classifiers; "
        "when not, predictionCol holds the output itself",
        typeConverter=TypeConverters.toString,
    )


class TrainingParams(  # type: ignore[misc]
    OutputParams, HasFeaturesCol, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed
):
    """What a fit needs to know."""

    model = Param(
        Params._dummy(),
        "model",
        'builder of the compiled keras.Model: "module:function", or a function (which cannot be saved)',
        typeConverter=_to_builder,
    )
    featuresCols = Param(
        Params._dummy(),
        "featuresCols",
        "feature columns, each an input of the model by its name; instead of featuresCol",
        typeConverter=TypeConverters.toListString,
    )
    schema = Param(
        Params._dummy(),
        "schema",
        "a Schema or the path of its file: roles, preprocessing and null policies of the columns; instead of "
        "featuresCol(s), labelCol and weightCol",
        typeConverter=_to_schema,
    )
    sync = Param(
        Params._dummy(),
        "sync",
        'how workers synchronize: a strategy or its text, "local_sgd:every=16" for instance',
        typeConverter=_to_sync,
    )
    numWorkers = Param(
        Params._dummy(), "numWorkers", "workers, one barrier task each", typeConverter=TypeConverters.toInt
    )
    gpusPerWorker = Param(Params._dummy(), "gpusPerWorker", "GPUs of a worker", typeConverter=TypeConverters.toInt)
    globalBatchSize = Param(
        Params._dummy(),
        "globalBatchSize",
        "rows of one optimizer step over all workers",
        typeConverter=TypeConverters.toInt,
    )
    epochs = Param(Params._dummy(), "epochs", "passes over the rows", typeConverter=TypeConverters.toInt)
    maxRestarts = Param(
        Params._dummy(),
        "maxRestarts",
        "how often a failed run is started again from its last checkpoint",
        typeConverter=TypeConverters.toInt,
    )
    storeDir = Param(
        Params._dummy(),
        "storeDir",
        "folder that this program and the executors share; a fit keeps its checkpoints there, and a table of rows "
        "that are in none, and removes them when it ends",
        typeConverter=TypeConverters.toString,
    )
    quiet = Param(Params._dummy(), "quiet", "show no progress", typeConverter=TypeConverters.toBoolean)
