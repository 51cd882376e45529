"""A saved model over rows, on Spark: those of a pinned snapshot, or the batches of a DataFrame.

Tasks feed the model as training does, with the schema and the statistics that were saved with it, so that
evaluation and scoring cannot drift from training. A Python worker loads a model once and keeps it.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.errors import InputError, ModelError
from dl_on_spark.input_pipeline import Preprocessor
from dl_on_spark.lake import RowGroupDecoder, Schema, Snapshot, Statistics, storage
from dl_on_spark.lake.spark_session import default_parallelism

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame, SparkSession

Scores = npt.NDArray[np.float32]
# The model's outputs by name; the one output of most models has the name "".
Outputs = dict[str, Scores]

_BATCH_ROWS = 8_192
# Models of this Python worker, by digest: Spark reuses the process for many tasks.
_loaded: dict[str, Predictor] = {}


@dataclass(frozen=True)
class SavedModel:
    """A folder with model.keras, schema.yaml and statistics.json: a training run's or a published version's.

    ``data``: the content of model.keras, where it travels with this object and the folder may be gone.
    """

    folder: str
    schema: Schema
    statistics: Statistics
    digest: str
    data: bytes | None = field(default=None, repr=False)

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

    def carrying_its_file(self) -> SavedModel:
        """The same model, which needs its folder no more."""
        return replace(self, data=self.file())

    def file(self) -> bytes:
        """The content of model.keras. Raises `ModelError` when it is not the one that was loaded."""
        data = storage.read_bytes(storage.join(self.folder, "model.keras")) if self.data is None else self.data
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise ModelError(f"{self.folder}/model.keras changed while it was read.", fix="Run the job again.")
        return data

    def keras_model(self) -> keras.Model:
        """The model in this process, not compiled. No code in the file is run (Keras's safe mode)."""
        import keras

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.keras"
            file.write_bytes(self.file())
            return keras.models.load_model(file, compile=False, safe_mode=True)


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
    tasks = max(1, min(groups, default_parallelism(spark)))
    # Spark itself broadcasts a function that has become large with what it carries.
    shipped = (model, snapshot.to_json(), list(keep), tasks, batch_rows, share)

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        saved, snapshot_json, kept, stride, rows_at_once, part = shipped
        pinned = Snapshot.from_json(snapshot_json)
        predict = predictor(saved)
        columns = list(dict.fromkeys([*(field.name for field in saved.schema.features), *kept]))
        with RowGroupDecoder(pinned, columns) as decoder:
            for batch in batches:
                for first in batch.column(0).to_pylist():
                    for group in range(first, pinned.num_row_groups, stride):
                        table = drawn(decoder.decode(group), group, part)
                        file = pinned.files[int(pinned.row_groups.file[group])].path or pinned.uri
                        outputs = predict(
                            table.select(columns[: len(saved.schema.features)]),
                            f"{file}, row group {int(pinned.row_groups.index[group])}",
                            rows_at_once,
                        )
                        yield from result(table.select(kept), _only(outputs, table.num_rows))

    return spark.range(0, tasks, 1, tasks).mapInArrow(task, result_schema)


def drawn(rows: pa.Table, group: int, share: float) -> pa.Table:
    """About `share` of the rows of row group number `group`, which seeds the choice: always the same ones."""
    if share >= 1:
        return rows
    return rows.filter(pa.array(np.random.default_rng(group).random(rows.num_rows) < share))


class Predictor:
    """A model in this process, ready for rows of a table. ``depths``: rank of each output, without the rows."""

    def __init__(self, saved: SavedModel) -> None:
        self._preprocessor = Preprocessor(saved.schema, saved.statistics)
        with _without_start_up_noise():
            import tensorflow as tf

            tf.config.set_visible_devices([], "GPU")
            # Tasks of an executor run side by side: each keeps to the cores that Spark gave it.
            cores = _cores_of_the_task()
            tf.config.threading.set_intra_op_parallelism_threads(cores)
            tf.config.threading.set_inter_op_parallelism_threads(cores)
            model = saved.keras_model()
        specs = self._preprocessor.tensor_specs()
        signature = {
            name: tf.TensorSpec((None, *specs[name][0]), tf.as_dtype(specs[name][1]), name=name)
            for name in self._preprocessor.feature_names
        }
        self._call = tf.function(
            lambda inputs: _named(model, model(inputs, training=False)), input_signature=[signature]
        )
        with _temporary_files_removed():
            traced = self._call.get_concrete_function().structured_outputs
        self.depths = {name: _depth(name, spec.shape) for name, spec in traced.items()}

    def __call__(self, features: pa.Table, source: str, batch_rows: int = _BATCH_ROWS) -> Outputs:
        """Outputs as float32 of shape (rows,) or (rows, \\*shape), at most `batch_rows` rows computed at once.

        `source` is named in errors. Raises `SchemaError` for rows that the model's schema refuses.
        """
        inputs = self._preprocessor.apply(features, source=source)
        parts = [
            self._predict({name: values[at : at + batch_rows] for name, values in inputs.items()})
            for at in range(0, features.num_rows, batch_rows)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.depths} if parts else {}

    def _predict(self, inputs: dict[str, Any]) -> Outputs:
        import tensorflow as tf

        outputs = self._call({name: tf.convert_to_tensor(inputs[name]) for name in self._preprocessor.feature_names})
        found = {name: np.asarray(output.numpy(), dtype=np.float32) for name, output in outputs.items()}
        return {name: array if self.depths[name] else array.reshape(-1) for name, array in found.items()}


def predictor(saved: SavedModel) -> Predictor:
    """The model as this Python worker keeps it."""
    if saved.digest not in _loaded:
        ready = Predictor(saved)
        _loaded.clear()  # one model at a time: versions follow each other
        _loaded[saved.digest] = ready
    return _loaded[saved.digest]


def _named(model: keras.Model, output: Any) -> dict[str, Any]:
    if isinstance(output, (list, tuple)):
        return dict(zip(model.output_names, output, strict=True))
    return output if isinstance(output, dict) else {"": output}


def _depth(name: str, shape: Any) -> int:
    """Rank of an output without the rows; one number a row has rank 0, whether in a column of one or not."""
    if shape.rank is None:
        raise ModelError(f"the model's output {name!r} has no fixed rank.", fix="Reshape it in the model.")
    return 0 if list(shape)[1:] == [1] else int(shape.rank) - 1


def _only(outputs: Outputs, rows: int) -> Scores:
    """The scores of a model with one output."""
    if rows and list(outputs) != [""]:
        raise ModelError("the model has several outputs; scoring takes one.", fix="Export a model with one output.")
    return outputs.get("", np.zeros(0, np.float32))


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
