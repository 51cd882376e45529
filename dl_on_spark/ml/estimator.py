"""`KerasEstimator`: a fit of pyspark.ml is a run of `Trainer` in a barrier stage."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable, DefaultParamsWriter

from dl_on_spark.errors import ConfigError
from dl_on_spark.lake import Schema, storage
from dl_on_spark.ml.columns import check_column, schema_of
from dl_on_spark.ml.frames import tables_of
from dl_on_spark.ml.model import KerasModel
from dl_on_spark.ml.params import TrainingParams, with_accessors
from dl_on_spark.training import Trainer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@with_accessors
class KerasEstimator(  # type: ignore[misc]
    Estimator, TrainingParams, DefaultParamsReadable, DefaultParamsWritable
):
    """Trains a compiled Keras model on a DataFrame with ``numWorkers`` workers.

    ``model`` builds it: ``"module:function"`` or a function, as for `Trainer`. Features are the column
    ``featuresCol`` (a vector, say) or the columns ``featuresCols``; each reaches the model's input of its name.
    ``storeDir``: a folder that this program and the executors share; nothing is left there.
    ``explainParams()`` tells all Params.

    A DataFrame that is a plain scan of a Parquet table is read in place by the workers; any other is written once
    to ``storeDir``. Errors are those of `Trainer.fit`.
    """

    @keyword_only
    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._setDefault(
            sync="allreduce",
            numWorkers=1,
            gpusPerWorker=0,
            globalBatchSize=4096,
            epochs=1,
            seed=7,
            maxRestarts=3,
            quiet=False,
        )
        self._set(**params)

    @keyword_only
    def setParams(self, **params: Any) -> KerasEstimator:
        """Set several Params by name."""
        self._set(**params)
        return self

    def _fit(self, dataset: DataFrame) -> KerasModel:
        for name in ("model", "storeDir"):
            if not self.isDefined(name):
                raise ConfigError(f"KerasEstimator needs {name}.", fix=f"{name}: {self.getParam(name).doc}.")
        schema, indicator = self._schema(dataset), self._given("validationIndicatorCol")
        if indicator is not None:
            check_column(dataset, indicator)
        workers = self.getOrDefault("numWorkers")
        store = storage.local_path(self.getOrDefault("storeDir")) or self.getOrDefault("storeDir")
        folder = storage.join(store, f"{self.uid}-{uuid.uuid4().hex[:8]}")
        trainer = Trainer(
            model=self.getOrDefault("model"),
            sync=self.getOrDefault("sync"),
            num_workers=workers,
            gpus_per_worker=self.getOrDefault("gpusPerWorker"),
            checkpoint_dir=storage.join(folder, "run"),
            max_restarts=self.getOrDefault("maxRestarts"),
        )
        try:
            table, validation = tables_of(dataset, schema, indicator, folder, workers)
            result = trainer.fit(
                dataset.sparkSession,
                table,
                schema=schema,
                validation=validation,
                global_batch_size=self.getOrDefault("globalBatchSize"),
                epochs=self.getOrDefault("epochs"),
                seed=self.getOrDefault("seed"),
                quiet=self.getOrDefault("quiet"),
            )
            model = KerasModel.of_run(dataset.sparkSession, result)
        finally:
            storage.delete(folder)
        model._resetUid(self.uid)
        fitted: KerasModel = self._copyValues(model)
        return fitted

    def _schema(self, dataset: DataFrame) -> Schema:
        columns = ("featuresCol", "featuresCols", "labelCol", "weightCol")
        given = [name for name in columns if self.isSet(name)]
        if self.isSet("schema"):
            if given:
                raise ConfigError(f"schema and {given[0]} are both given.", fix="The schema's roles name the columns.")
            schema = Schema.from_yaml(self.getOrDefault("schema"))
            for name in schema.feed_columns:
                check_column(dataset, name.split(".", maxsplit=1)[0])
            return schema
        if "featuresCol" in given and "featuresCols" in given:
            raise ConfigError("featuresCol and featuresCols are both given.", fix="Give one of them.")
        features = self._given("featuresCols") or [self.getOrDefault("featuresCol")]
        return schema_of(dataset, features, self.getOrDefault("labelCol"), self._given("weightCol"))

    def _given(self, name: str) -> Any:
        return self.getOrDefault(name) if self.isDefined(name) and self.getOrDefault(name) else None

    def write(self) -> DefaultParamsWriter:
        """Saves the Params. Raises `ConfigError` for a model that is a function: that would need a pickle."""
        for name in ("model", "sync"):
            if self.isDefined(name) and not isinstance(self.getOrDefault(name), str):
                raise ConfigError(
                    f"KerasEstimator's {name} is an object of this program, which is not saved.",
                    fix='Give its name: model="module:function", sync="local_sgd:every=16".',
                )
        return DefaultParamsWriter(self)
