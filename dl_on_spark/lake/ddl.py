"""Spark's type names (DDL) as Arrow types, without a JVM."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pyarrow as pa

from dl_on_spark.errors import SchemaError

# Spark ML's VectorUDT as Parquet holds it: type 0 is sparse (size, indices, values), type 1 dense (values alone).
VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)
_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "vector": VECTOR,
}
_DECIMAL = re.compile(r"(?:decimal|numeric|dec)(?:\((\d+)(?:,(\d+))?\))?")


def arrow_type(text: str) -> pa.DataType:
    """The Arrow type of a DDL type: primitives, ``decimal(p,s)``, ``array<…>``, ``struct<name:type,…>``.

    Raises `SchemaError` for any other.
    """
    found = _parse("".join(text.lower().split()))
    if found is None:
        raise SchemaError(
            f"type {text!r} is not one that can be used.",
            fix=f"Known: {', '.join(sorted(_PLAIN))}, decimal(p,s), array<...>, struct<name:type,...>.",
        )
    return found


def fits(have: pa.DataType, need: pa.DataType) -> bool:
    """Whether every value of a column of type `have` is a value of type `need`."""
    if pa.types.is_dictionary(have):
        have = have.value_type
    if have == need:
        return True
    if pa.types.is_integer(have) and pa.types.is_integer(need):
        return _integer_bits(have) <= _integer_bits(need)
    if pa.types.is_floating(have) and pa.types.is_floating(need):
        return bool(have.bit_width <= need.bit_width)
    if pa.types.is_decimal(have) and pa.types.is_decimal(need):
        whole = have.precision - have.scale <= need.precision - need.scale
        return bool(have.scale <= need.scale and whole)
    if need == VECTOR:
        return is_vector(have)
    if _is_list(have) and pa.types.is_list(need):
        return fits(have.value_type, need.value_type)
    return any(kind(have) and kind(need) for kind in (_is_text, _is_bytes, pa.types.is_date, _is_timestamp))


def element_type(kind: pa.DataType) -> pa.DataType:
    """What a list holds, however deep, and float64 for a vector; any other type is its own."""
    while _is_list(kind):
        kind = kind.value_type
    return pa.float64() if is_vector(kind) else kind


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column of this type holds Spark ML vectors, whatever its lists and fields are called inside."""
    names = ["type", "size", "indices", "values"]
    if not pa.types.is_struct(kind) or [field.name for field in kind] != names:
        return False
    return all(fits(have.type, need.type) for have, need in zip(kind, VECTOR, strict=True))


def scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A value of YAML or Python as one of type `kind`; a date or time may be text.

    Raises `ValueError`, `TypeError`, `ArithmeticError` or an `ArrowException` where it is none.
    """
    if pa.types.is_decimal(kind):
        return pa.scalar(Decimal(str(value)), kind)
    if isinstance(value, str) and pa.types.is_temporal(kind):
        return pa.scalar(value).cast(kind)
    return pa.scalar(value, kind)


def quoted(name: str) -> str:
    """A column's name as Spark takes it, whatever letters it has: a dot would lead into a struct."""
    return "`" + name.replace("`", "``") + "`"


def _parse(text: str) -> pa.DataType | None:
    if text in _PLAIN:
        return _PLAIN[text]
    decimal = _DECIMAL.fullmatch(text)
    if decimal:
        precision, scale = int(decimal[1] or 10), int(decimal[2] or 0)
        return pa.decimal128(precision, scale) if 1 <= precision <= 38 and scale <= precision else None
    if text.startswith("array<") and text.endswith(">"):
        element = _parse(text[6:-1])
        return None if element is None else pa.list_(element)
    if text.startswith("struct<") and text.endswith(">"):
        return _struct(text[7:-1])
    return None


def _struct(text: str) -> pa.DataType | None:
    fields, depth, start = [], 0, 0
    for at, letter in enumerate(text + ","):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            name, _, kind = text[start:at].partition(":")
            parsed = _parse(kind)
            if not name or parsed is None:
                return None
            fields.append(pa.field(name, parsed))
            start = at + 1
    return pa.struct(fields)


def _integer_bits(kind: pa.DataType) -> int:
    """Bits of the signed type that holds all values."""
    return int(kind.bit_width) + int(pa.types.is_unsigned_integer(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _is_timestamp(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind))
