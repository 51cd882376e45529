"""How a `KerasModel` is saved: metadata as pyspark.ml's own, and one small Parquet table of files beside it.

Spark writes and reads both, so any file system of the cluster will do, under Spark Connect too. The Keras
file, the schema (YAML), the statistics and the summary (JSON) are data: nothing is unpickled on load.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from dl_on_spark.errors import ConfigError, ModelError
from dl_on_spark.lake import Schema, Statistics, storage
from dl_on_spark.lake.spark_session import spark_context
from dl_on_spark.registry.predictions import SavedModel
from dl_on_spark.training import TrainingResult

if TYPE_CHECKING:
    from dl_on_spark.ml.model import KerasModel

_FILES = "files"
_ENCODING = "utf-8"


class KerasModelWriter(MLWriter):  # type: ignore[misc]
    """Writes a `KerasModel`; ``overwrite()`` replaces what is there."""

    def __init__(self, instance: KerasModel) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        """Save to `path`, which must not be there."""
        model, spark = self.instance, self.sparkSession
        saved = model.saved
        files = {
            "model.keras": saved.file(),
            "schema.yaml": saved.schema.to_yaml().encode(_ENCODING),
            "statistics.json": saved.statistics.to_json().encode(_ENCODING),
        }
        if model.summary is not None:
            files["summary.json"] = model.summary.to_json().encode(_ENCODING)
        more = {"depths": model._depths, "digest": saved.digest}
        # Spark 3.5 wants the context here, Spark 4 takes either.
        DefaultParamsWriter.saveMetadata(model, path, spark_context(spark) or spark, extraMetadata=more)
        rows = [(name, bytearray(content)) for name, content in files.items()]
        table = spark.createDataFrame(rows, "name string, content binary").coalesce(1)
        table.write.parquet(storage.join(path, _FILES))

    def _handleOverwrite(self, path: str) -> None:
        if spark_context(self.sparkSession) is None:
            raise ConfigError(
                f"a saved model cannot be removed through Spark Connect: {path}.", fix="Save to a new path."
            )
        super()._handleOverwrite(path)


class KerasModelReader(MLReader):  # type: ignore[misc]
    """Reads what `KerasModelWriter` wrote."""

    def __init__(self, kind: type[KerasModel]) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> KerasModel:
        """The model at `path`. Raises `ModelError` when its files are damaged."""
        spark = self.sparkSession
        metadata: dict[str, Any] = DefaultParamsReader.loadMetadata(path, spark_context(spark) or spark)
        rows = spark.read.parquet(storage.join(path, _FILES)).collect()
        files = {row.name: bytes(row.content) for row in rows}
        data, digest = files.get("model.keras", b""), metadata.get("digest")
        if hashlib.sha256(data).hexdigest() != digest:
            raise ModelError(f"{path}: model.keras is damaged.", fix="Save the model again.")
        saved = SavedModel(
            path,
            Schema.from_yaml(files["schema.yaml"].decode(_ENCODING), f"{path}: schema.yaml"),
            Statistics.from_json(files["statistics.json"].decode(_ENCODING)),
            digest,
            data,
        )
        summary = files.get("summary.json")
        model = self._kind(
            saved, metadata["depths"], None if summary is None else TrainingResult.from_json(summary.decode(_ENCODING))
        )
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
