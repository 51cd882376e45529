"""A saved model over the rows of a pinned snapshot, on Spark.

Tasks decode row groups as training does, with the schema and the statistics that were saved with the model,
so that evaluation and scoring cannot drift from training. A Python worker loads a model once and keeps it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import InputError, ModelError
from dl_on_spark.input_pipeline import Preprocessor
from dl_on_spark.lake import RowGroupDecoder, Schema, Snapshot, Statistics, storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Scores = npt.NDArray[np.float32]

_BATCH_ROWS = 8_192
# Models of this Python worker, by digest: Spark reuses the process for many tasks.
_loaded: dict[str, Callable[[dict[str, Any]], Scores]] = {}


@dataclass(frozen=True)
class SavedModel:
    """A folder with model.keras, schema.yaml and statistics.json: a training run's or a published version's."""

    folder: str
    schema: Schema
    statistics: Statistics
    digest: str

    @classmethod
    def load(cls, folder: str) -> SavedModel:
        """Read the folder. Raises `InputError` when there is no finished model in it, or a damaged one."""
        schema_file = storage.join(folder, "schema.yaml")
        try:
            model = storage.read_bytes(storage.join(folder, "model.keras"))
            schema = Schema.from_yaml(storage.read_bytes(schema_file).decode(), schema_file)
            statistics = Statistics.from_json(storage.read_bytes(storage.join(folder, "statistics.json")).decode())
        except FileNotFoundError as error:
            raise InputError(
                f"{folder} holds no finished model ({error}).", fix="Run the training job first."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(storage.join(folder, "statistics.json")) from error
        if not zipfile.is_zipfile(io.BytesIO(model)):
            raise _damaged(storage.join(folder, "model.keras"))
        return cls(folder, schema, statistics, hashlib.sha256(model).hexdigest())


def _damaged(file: str) -> InputError:
    return InputError(
        f"{file} is damaged.",
        fix="Train again with --resume never, or go back to a whole version: dl-on-spark rollback.",
    )


def map_predictions(
    spark: SparkSession,
    model: SavedModel,
    snapshot: Snapshot,
    keep: Sequence[str],
    result: Callable[[pa.Table, Scores], Iterator[pa.RecordBatch]],
    result_schema: Any,
    batch_rows: int = _BATCH_ROWS,
    share: float = 1.0,
) -> DataFrame:
    """`result(kept columns, scores)` of each row group of the snapshot, as a Spark DataFrame.

    ``keep``: the snapshot's columns that `result` sees beside the scores, which are float32 of shape (rows,),
    or (rows, outputs) for a model with several. ``share``: of each row group's rows, see `drawn`. Raises `SchemaError`
    when the snapshot lacks a feature.
    """
    features = [field.name for field in model.schema.features]
    model.schema.check(snapshot.schema, snapshot.uri, features)
    groups = snapshot.num_row_groups
    tasks = max(1, min(groups, spark.sparkContext.defaultParallelism))
    shipped = spark.sparkContext.broadcast((model, snapshot.to_json(), list(keep), tasks, batch_rows, share))

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        saved, snapshot_json, kept, stride, rows_at_once, part = shipped.value
        pinned = Snapshot.from_json(snapshot_json)
        preprocessor = Preprocessor(saved.schema, saved.statistics)
        predict = _predictor(saved, preprocessor)
        columns = list(dict.fromkeys([*(field.name for field in saved.schema.features), *kept]))
        with RowGroupDecoder(pinned, columns) as decoder:
            for batch in batches:
                for first in batch.column(0).to_pylist():
                    for group in range(first, pinned.num_row_groups, stride):
                        table = drawn(decoder.decode(group), group, part)
                        file = pinned.files[int(pinned.row_groups.file[group])].path or pinned.uri
                        inputs = preprocessor.apply(
                            table.select(columns[: len(saved.schema.features)]),
                            source=f"{file}, row group {int(pinned.row_groups.index[group])}",
                        )
                        scores = _in_batches(predict, inputs, table.num_rows, rows_at_once)
                        yield from result(table.select(kept), scores)

    return spark.range(0, tasks, 1, tasks).mapInArrow(task, result_schema)


def drawn(rows: pa.Table, group: int, share: float) -> pa.Table:
    """About `share` of the rows of row group number `group`, which seeds the choice: always the same ones."""
    if share >= 1:
        return rows
    return rows.filter(pa.array(np.random.default_rng(group).random(rows.num_rows) < share))


def _predictor(saved: SavedModel, preprocessor: Preprocessor) -> Callable[[dict[str, Any]], Scores]:
    if saved.digest in _loaded:
        return _loaded[saved.digest]
    data = storage.read_bytes(storage.join(saved.folder, "model.keras"))
    if hashlib.sha256(data).hexdigest() != saved.digest:
        raise ModelError(f"{saved.folder}/model.keras changed while it was read.", fix="Run the job again.")
    with _without_start_up_noise():
        import keras
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        # Tasks of an executor run side by side: each keeps to the cores that Spark gave it.
        cores = _cores_of_the_task()
        tf.config.threading.set_intra_op_parallelism_threads(cores)
        tf.config.threading.set_inter_op_parallelism_threads(cores)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.keras"
            file.write_bytes(data)
            model = keras.models.load_model(file, compile=False, safe_mode=True)
    specs = preprocessor.tensor_specs()
    signature = {
        name: tf.TensorSpec((None, *specs[name][0]), tf.as_dtype(specs[name][1]), name=name)
        for name in preprocessor.feature_names
    }
    call = tf.function(lambda inputs: model(inputs, training=False), input_signature=[signature])
    with _temporary_files_removed():
        call.get_concrete_function()  # traces the model

    def predict(inputs: dict[str, Any]) -> Scores:
        output = call({name: tf.convert_to_tensor(inputs[name]) for name in signature})
        if not isinstance(output, tf.Tensor):
            raise ModelError("the model has several outputs; scoring takes one.", fix="Export a model with one output.")
        return np.asarray(output.numpy(), dtype=np.float32)

    _loaded.clear()  # one model at a time: versions follow each other
    _loaded[saved.digest] = predict
    return predict


@contextlib.contextmanager
def _temporary_files_removed() -> Iterator[None]:
    """Remove what is left in the folder for temporary files: AutoGraph's sources, of which TensorFlow removes its own
    at a regular exit only, which Spark's Python workers do not have."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _cores_of_the_task() -> int:
    from pyspark import TaskContext

    task = TaskContext.get()
    return max(1, task.cpus()) if task is not None else 1


@contextlib.contextmanager
def _without_start_up_noise() -> Iterator[None]:
    """Keep TensorFlow's start-up lines, which no log level reaches, out of the executor's log.

    What was written meanwhile is shown only when the start fails.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        own = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except BaseException:
            caught.seek(0)
            os.write(own, caught.read())
            raise
        finally:
            os.dup2(own, 2)
            os.close(own)


def _in_batches(predict: Callable[[dict[str, Any]], Scores], inputs: dict[str, Any], rows: int, at_once: int) -> Scores:
    parts = [
        predict({name: values[at : at + at_once] for name, values in inputs.items()}) for at in range(0, rows, at_once)
    ]
    if not parts:
        return np.zeros(0, np.float32)
    scores = np.concatenate(parts)
    return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores
