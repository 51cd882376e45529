"""Arrow columns as NumPy arrays: without a copy where Arrow's layout allows it.

| Arrow | NumPy |
|---|---|
| integers, floats, bool | the dtype asked for; narrowing an integer is checked |
| date | int32, days since 1970-01-01 |
| timestamp | int64, microseconds since 1970-01-01 UTC |
| decimal | float64 |
| string / binary | object array of `str` / `bytes` |
| lists of one fixed shape, or padded to it | flat values, to be reshaped to (rows, \\*shape) |
| Spark ML vectors, dense or sparse | flat float64 values, to be reshaped to (rows, size) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dl_on_spark.errors import SchemaError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)


def contiguous(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one Arrow array, without a copy if it has one chunk.

    Text may stay dictionary-encoded; a dictionary of anything else, or with nulls, is decoded.
    """
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks == 1:
            column = column.chunk(0)
        else:
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type) and (column.null_count or not is_text(column.type)):
        column = column.dictionary_decode()
    return column


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether values of this type are lists of any layout."""
    return bool(
        pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type)
    )


def flat_values(array: pa.Array, shape: tuple[int, ...], where: str) -> pa.Array:
    """Values of a list column in row-major order: ``rows × prod(shape)`` of them.

    A null list becomes a list of nulls, so one policy serves both kinds of null. Lists may be
    nested as deep as ``shape`` or stored flat. Raises `SchemaError` for a list of another length.
    """
    depth = _list_depth(array.type)
    sizes = shape if depth == len(shape) else (*(1,) * (depth - 1), math.prod(shape))
    for size in sizes:
        array = _flatten_once(array, size, where)
    return array


def finite_or_null(array: pa.Array, where: str) -> pa.Array:
    """Floats with every NaN as a null, as pandas and Spark's `na` functions count it.

    Raises `SchemaError` for an infinite value: one would make every weight of the model NaN.
    """
    wide = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array  # Arrow has no kernels for halfs
    total = pc.sum(wide).as_py()
    if total is None or math.isfinite(total):  # one fast pass; what is not finite never sums to a finite number
        return array
    if (infinite := pc.sum(pc.is_inf(wide)).as_py()) > 0:
        raise SchemaError(
            f"{where} has {infinite} infinite values among {len(array)}.",
            fix="Correct or remove these rows in the ETL (a schema's checks put them into quarantine).",
        )
    missing = pc.fill_null(pc.is_nan(wide), False)
    return pc.if_else(missing, pa.scalar(None, array.type), array) if pc.any(missing).as_py() else array


def padded_values(array: pa.Array, size: int, pad: Any, where: str) -> pa.Array:
    """Values of a list column, each list filled up with ``pad`` to ``size``: ``rows × size`` of them.

    A null list becomes nulls. Raises `SchemaError` for a longer list: values are never cut.
    """
    lengths = pc.list_value_length(array)
    longest = pc.max(lengths).as_py() or 0
    if longest > size:
        raise SchemaError(
            f"{where}: a list of {longest} values where the schema's shape asks for {size} at most.",
            fix="Raise `shape` in the schema, or cut the lists in the ETL.",
        )
    counts = pc.fill_null(lengths, 0).to_numpy()
    inside = np.arange(size)[None, :] < counts[:, None]
    # Position of each list's values among all of them; what is outside of its list is taken from nowhere.
    at = np.cumsum(counts) - counts
    indices = pa.array((at[:, None] + np.arange(size)).reshape(-1), mask=~inside.reshape(-1))
    values = array.flatten()
    taken = values.take(indices)
    outside = ~inside & lengths.is_valid().to_numpy(zero_copy_only=False)[:, None]
    return pc.if_else(pa.array(outside.reshape(-1)), pa.scalar(pad, values.type), taken)


def vector_values(array: pa.Array, size: int, where: str) -> pa.Array:
    """Values of Spark ML vectors, dense and sparse, as ``rows × size`` float64; a null vector becomes nulls."""
    kinds, sizes, indices, values = array.flatten()  # each with the nulls of the vectors
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    dense = valid & (pc.fill_null(kinds, -1).to_numpy() == 1)
    counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    lengths = np.where(dense, counts, pc.fill_null(sizes, 0).to_numpy())
    wrong = np.flatnonzero(valid & (lengths != size))
    if wrong.size:
        raise SchemaError(
            f"{where}: a vector of {lengths[wrong[0]]} values where the schema's shape asks for {size}.",
            fix="Correct `shape` in the schema, or make vectors of one size in the ETL.",
        )
    numbers = np.asarray(values.flatten().to_numpy(zero_copy_only=False), np.float64)
    if dense.all():
        return pa.array(numbers)
    found = np.zeros((len(array), size))
    rows = np.repeat(np.arange(len(array)), counts)
    in_dense = dense[rows]
    found[dense] = numbers[in_dense].reshape(-1, size)
    places = indices.filter(pa.array(~dense & valid)).flatten().to_numpy(zero_copy_only=False)
    found[rows[~in_dense], places] = numbers[~in_dense]
    return pa.array(found.reshape(-1), mask=np.repeat(~valid, size))


@dataclass(frozen=True)
class EncodedText:
    """A text column: row i is ``distinct[codes[i]]``.

    One Python string per distinct value, not per row: the rows share them. The shuffle moves the
    codes, which is much cheaper than moving counted references.
    """

    codes: Array
    distinct: Array

    def __getitem__(self, rows: slice) -> Array:
        """Some rows as an object array of `str`."""
        return self.distinct.take(self.codes[rows])

    def with_codes(self, codes: Array) -> EncodedText:
        """Other rows of the same strings."""
        return EncodedText(codes, self.distinct)

    def to_numpy(self) -> Array:
        """All rows as an object array of `str`."""
        return self[:]


def encoded_text(array: pa.Array) -> EncodedText:
    """Text without nulls, plain or dictionary-encoded, as codes and distinct strings."""
    encoded = dictionary_encoded(array)
    distinct = encoded.dictionary.to_numpy(zero_copy_only=False).astype(object, copy=False)
    return EncodedText(encoded.indices.to_numpy(), distinct)


def dictionary_encoded(array: pa.Array) -> pa.DictionaryArray:
    """The array as codes and distinct values."""
    return array if pa.types.is_dictionary(array.type) else array.dictionary_encode()


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether values are text, plain or dictionary-encoded."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def to_numpy(array: pa.Array, dtype: str, where: str) -> Array:
    """A flat Arrow array without nulls as NumPy array of ``dtype`` ("string" for text and bytes).

    The result may be a read-only view of Arrow's memory. Raises `SchemaError` for a value that
    does not fit ``dtype``: values are never wrapped or cut.
    """
    arrow_type = array.type
    if is_text(arrow_type):
        return encoded_text(array).to_numpy()
    if any(kind(arrow_type) for kind in _BYTES):
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=object)
    try:
        return _numbers(array, dtype)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"{where}: a value of type {arrow_type} does not fit {dtype} ({error}).",
            fix="Give the field a wider `type` in the schema, or correct the table.",
        ) from error


def _numbers(array: pa.Array, dtype: str) -> Array:
    arrow_type, wanted = array.type, np.dtype(dtype)
    if pa.types.is_boolean(arrow_type):
        return np.asarray(array.to_numpy(zero_copy_only=False)).astype(wanted, copy=False)
    if pa.types.is_date(arrow_type):
        array = array.cast(pa.date32()).view(pa.int32())
    elif pa.types.is_timestamp(arrow_type):
        # Nanoseconds lose their last three digits here; a second that does not fit raises.
        micros = array.cast(pa.timestamp("us", arrow_type.tz), safe=arrow_type.unit != "ns")
        array = micros.view(pa.int64())
    elif pa.types.is_decimal(arrow_type):
        array = array.cast(pa.float64())
    elif pa.types.is_null(arrow_type):
        array = array.cast(pa.from_numpy_dtype(wanted))
    values: Array = array.to_numpy(zero_copy_only=False)
    if values.dtype == wanted:
        return values
    if np.can_cast(values.dtype, wanted, "safe") or wanted.kind == "f":
        return values.astype(wanted)
    checked: Array = array.cast(pa.from_numpy_dtype(wanted)).to_numpy(zero_copy_only=False)
    return checked


def _list_depth(arrow_type: pa.DataType) -> int:
    depth = 0
    while is_list(arrow_type):
        arrow_type, depth = arrow_type.value_type, depth + 1
    return depth


def _flatten_once(array: pa.Array, size: int, where: str) -> pa.Array:
    lengths = pc.list_value_length(array)
    bounds = pc.min_max(lengths)
    if bounds["min"].is_valid and (bounds["min"].as_py(), bounds["max"].as_py()) != (size, size):
        wrong = bounds["max"].as_py() if bounds["min"].as_py() == size else bounds["min"].as_py()
        raise SchemaError(
            f"{where}: a list of {wrong} values where the schema's shape asks for {size}.",
            fix="Pad or cut the lists in the ETL, or correct `shape` in the schema.",
        )
    values = array.flatten()
    if array.null_count == 0:
        return values
    present = array.is_valid().to_numpy(zero_copy_only=False)
    rows = np.cumsum(present) - 1
    indices = (rows[:, None] * size + np.arange(size)[None, :]).reshape(-1)
    return values.take(pa.array(indices, mask=np.repeat(~present, size)))
