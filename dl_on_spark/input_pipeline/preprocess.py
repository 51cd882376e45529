"""Columns of a table as the model's inputs: nulls, types and preprocessing by the schema.

Training and scoring use the same `Preprocessor` with the same stored statistics, so they cannot
drift apart. All work is vectorized: Arrow in, NumPy out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dl_on_spark.errors import SchemaError
from dl_on_spark.input_pipeline.hashing import stable_buckets
from dl_on_spark.input_pipeline.tensors import (
    Array,
    EncodedText,
    contiguous,
    dictionary_encoded,
    encoded_text,
    finite_or_null,
    flat_values,
    is_list,
    is_text,
    padded_values,
    to_numpy,
    vector_values,
)
from dl_on_spark.lake import codecs, ddl
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.tensor_columns import TENSOR_CODECS

if TYPE_CHECKING:
    from dl_on_spark.lake.statistics import FieldStatistics, Statistics

Columns = dict[str, Array]
Batch = tuple[Columns, Any, Array | None]
TensorSpec = tuple[tuple[int, ...], str]


class Preprocessor:
    """Turns the columns of a table into tensors, one function per field.

    ``statistics`` are needed where the schema standardizes, has a vocabulary or buckets by
    quantiles; a missing one is a `SchemaError` here, not in the middle of training.
    """

    def __init__(self, schema: Schema, statistics: Statistics | None) -> None:
        self.schema = schema
        known = {} if statistics is None else statistics.fields
        weight = [] if schema.weight is None else [schema.weight]
        self._required = {field.name for field in schema.features}
        self._columns = [
            _FieldColumn(field, known.get(field.name)) for field in (*schema.features, *schema.labels, *weight)
        ]
        # The model's inputs, the null indicators among them, in order.
        self.feature_names = [
            name for column in self._columns if column.field.name in self._required for name in column.specs
        ]

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """(shape without the batch dimension, dtype name) of all that `apply` may give, by name."""
        return {name: spec for column in self._columns for name, spec in column.specs.items()}

    def split(self, columns: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        """Columns by name as (features, labels, weights).

        Labels: one value, a dict when the schema has several, None when it has none. Weights: None
        without a weight field.
        """
        labels = {field.name: columns[field.name] for field in self.schema.labels}
        weight = self.schema.weight
        features = {name: columns[name] for name in self.feature_names}
        target = next(iter(labels.values()), None) if len(labels) < 2 else labels
        return features, target, None if weight is None else columns[weight.name]

    def element(self, columns: dict[str, Any]) -> Any:
        """What Keras takes as one batch: ``(x, y)``, ``(x, y, weights)``, or ``x`` without a label."""
        features, labels, weights = self.split(columns)
        if labels is None:
            return features
        return (features, labels) if weights is None else (features, labels, weights)

    def apply(self, table: pa.Table, *, source: str = "the table") -> Columns:
        """Arrays (rows, \\*shape) of the fields that ``table`` has, by name.

        A label or weight may be absent (scoring); a feature may not. ``source`` is named in errors:
        the file and row group, say. Raises `SchemaError` for a null that the schema refuses and for
        values that do not fit.
        """
        found = self.apply_encoded(table, source=source)
        return {name: c.to_numpy() if isinstance(c, EncodedText) else c for name, c in found.items()}

    def apply_encoded(self, table: pa.Table, *, source: str) -> dict[str, Array | EncodedText]:
        """As `apply`, but text that is fed as it is stays encoded, for the shuffle."""
        arrays: dict[str, Array | EncodedText] = {}
        for column in self._columns:
            name = column.field.name
            if name in table.column_names:
                arrays.update(column.arrays(table.column(name), source))
            elif name in self._required:
                raise SchemaError(
                    f"{source} has no column {name!r}, a feature of schema {self.schema.name!r}.",
                    fix="Select the column too, or remove the feature from the schema.",
                )
        return arrays


class _FieldColumn:
    """One field: its policy for nulls, NaN among them, then its transform."""

    def __init__(self, field: Field, statistics: FieldStatistics | None) -> None:
        _check_feedable(field)
        self.field = field
        shape, dtype = field.tensor_spec()
        self._shape, self._dtype = shape, dtype
        self.specs: dict[str, TensorSpec] = {field.name: (shape, dtype)}
        self._indicator = f"{field.name}_is_null" if field.nulls == "indicator" else None
        if self._indicator is not None:
            self.specs[self._indicator] = (shape, "float32")
        self._fill = field.nulls["fill"] if isinstance(field.nulls, dict) else None
        self._transform = _transform_of(field, statistics)
        self._plain_text = field.step is None and not shape
        self._tensor = codecs.TensorSpec.of(field) if field.codec in TENSOR_CODECS else None

    def arrays(self, column: pa.ChunkedArray, source: str) -> dict[str, Array | EncodedText]:
        where = f"Column {self.field.name!r} of {source}"
        if self._tensor is not None:
            array = codecs.decode(column, self._tensor, where)
        else:
            array = contiguous(column)
            if self._shape:
                array = self._flat(array, where)
        if pa.types.is_floating(array.type):
            array = finite_or_null(array, where)
        found: dict[str, Array | EncodedText] = {}
        if self._indicator is not None:
            missing = array.is_null().to_numpy(zero_copy_only=False)
            found[self._indicator] = missing.astype(np.float32).reshape(-1, *self._shape)
        if array.null_count:
            array = self._without_nulls(array, where)
        if self._plain_text and is_text(array.type):
            return {**found, self.field.name: encoded_text(array)}
        values = self._transform(array, where)
        if self._indicator is not None and self.field.step == "standardize":
            values[missing] = 0  # the mean: the indicator alone speaks for a missing value
        found[self.field.name] = values.reshape(-1, *self._shape)
        return found

    def _flat(self, array: pa.Array, where: str) -> pa.Array:
        if ddl.is_vector(array.type):
            return vector_values(array, self._shape[0], where)
        if self.field.pad is not None:
            return padded_values(array, self._shape[0], self.field.pad, where)
        return flat_values(array, self._shape, where)

    def _without_nulls(self, array: pa.Array, where: str) -> pa.Array:
        if self.field.nulls == "refuse":
            raise SchemaError(
                f"{where} has {array.null_count} nulls or NaN among {len(array)} values.",
                fix=f"Give {self.field.name!r} a policy in the schema (nulls: indicator, or "
                "nulls: {fill: VALUE}), or remove these rows in the ETL.",
            )
        fill = _zero_of(array.type) if self._fill is None else self._fill
        try:
            return pc.fill_null(array, ddl.scalar(fill, array.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, ArithmeticError) as error:
            raise SchemaError(
                f"{where} is of type {array.type}; its nulls cannot be filled with {fill!r} ({error}).",
                fix="Give `nulls: {fill: VALUE}` a value of the column's type.",
            ) from error


_Transform = Callable[[pa.Array, str], Array]


def _transform_of(field: Field, statistics: FieldStatistics | None) -> _Transform:
    _, dtype = field.tensor_spec()
    kind, options = field.step, field.options
    if kind == "standardize":
        known = _needed(field, statistics)
        return _standardize(_of(field, "mean", known.mean), _of(field, "std", known.std))
    if kind == "vocabulary":
        known = _needed(field, statistics)
        return _vocabulary(_of(field, "vocabulary", known.vocabulary), int(options.get("oov", 1)))
    if kind == "hash":
        return _hash(int(options["buckets"]))
    if kind == "bucketize":
        boundaries = options.get("boundaries")
        if boundaries is None:
            boundaries = _of(field, "boundaries", _needed(field, statistics).boundaries)
        return _bucketize(np.asarray(boundaries, dtype=np.float64))
    return lambda array, where: to_numpy(array, dtype, where)


def _standardize(mean: float, std: float) -> _Transform:
    scale = 1.0 / std if std > 0 else 1.0  # a constant column becomes zeros

    def transform(array: pa.Array, where: str) -> Array:
        # In float64: a large mean would eat the digits of float32.
        values = to_numpy(array, "float64", where) - mean
        values *= scale
        return values.astype(np.float32)

    return transform


def _vocabulary(words: Any, oov: int) -> _Transform:
    def transform(array: pa.Array, where: str) -> Array:
        encoded = dictionary_encoded(array)
        distinct = encoded.dictionary
        found = pc.index_in(distinct, value_set=pa.array(list(words)).cast(distinct.type))
        # Unknown values: one bucket, or several by hash; the words follow after these.
        unknown = stable_buckets(distinct, oov) if oov > 1 else np.zeros(len(distinct), np.int32)
        known = found.is_valid().to_numpy(zero_copy_only=False)
        indices = np.where(known, pc.fill_null(found, 0).to_numpy() + np.int32(oov), unknown)
        return np.asarray(indices.astype(np.int32).take(encoded.indices.to_numpy()))

    return transform


def _hash(buckets: int) -> _Transform:
    return lambda array, where: stable_buckets(array, buckets)


def _bucketize(boundaries: npt.NDArray[np.float64]) -> _Transform:
    """Bucket i holds the values from boundary i - 1 on and below boundary i."""

    def transform(array: pa.Array, where: str) -> Array:
        values = to_numpy(array, "float64", where)
        return np.searchsorted(boundaries, values, side="right").astype(np.int32)

    return transform


def _check_feedable(field: Field) -> None:
    """Refuse, before anything is read, a field that has no tensor of one shape."""
    problem = None
    if field.codec in TENSOR_CODECS:
        if field.shape is None:
            problem = f"is encoded ({field.codec}) without a shape"
    elif ddl.is_vector(field.arrow_type):
        if len(field.shape or ()) != 1:
            problem = "is a vector without a shape of one number"
    elif is_list(field.arrow_type) and not field.shape:
        problem = f"is a list ({field.type}) of any length"
    elif field.shape and not is_list(field.arrow_type):
        problem = f"has a shape, but its type {field.type} is not a list"
    if problem is not None:
        raise SchemaError(
            f"Field {field.name!r} {problem}.",
            fix="Give lists, vectors and encoded tensors their `shape`, and those of several sizes a `pad` value too; "
            "or give the field no role.",
        )


def _needed(field: Field, statistics: FieldStatistics | None) -> FieldStatistics:
    if statistics is None:
        raise SchemaError(
            f"Field {field.name!r} is preprocessed by statistics, and there are none for it.",
            fix="Compute them with `compute_statistics(spark, snapshot, schema)`, or load the "
            "statistics.json that was stored with the data or the model.",
        )
    return statistics


def _of(field: Field, what: str, value: Any) -> Any:
    if value is None:
        raise SchemaError(
            f"The statistics have no {what} for field {field.name!r}: they were made for another schema.",
            fix="Compute the statistics again with this schema.",
        )
    return value


def _zero_of(arrow_type: pa.DataType) -> Any:
    """What an indicator's nulls become: zero, False or the empty text, of the column's type."""
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        return ""
    if pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type):
        return b""
    return 0
