"""Which columns of a table can be tensors as they are stored, and what the others need."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dl_on_spark.errors import SchemaError
from dl_on_spark.lake.ddl import is_vector
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.tensor_columns import TENSOR_DTYPES, TensorColumn


def schema_of(arrow_schema: pa.Schema, uri: str) -> Schema:
    """A schema that feeds every column as it is stored.

    Raises `SchemaError` naming the columns whose type has no tensor.
    """
    specs = {column.name: field_spec(column) for column in arrow_schema}
    refused = [f"{name!r} ({stored_as(arrow_schema.field(name))})" for name, spec in specs.items() if spec is None]
    if refused:
        raise SchemaError(
            f"{uri}: columns {', '.join(refused)} cannot become tensors of one shape.",
            fix="Leave them out with `select`, or give a schema with a `shape` for lists and tensors.",
        )
    fields = {name: {**(spec or {}), "role": "feature"} for name, spec in specs.items()}
    return Schema.from_dict({"name": "as_stored", "fields": fields})


def field_spec(column: pa.Field) -> dict[str, Any] | None:
    """The schema entries that feed a column: ``type``, ``shape``, for encoded tensors ``codec`` and ``dtype`` too.

    None where there are none.
    """
    tensor, kind, shape = TensorColumn.of(column), column.type, []
    if tensor is not None and tensor.encoded:
        if None in tensor.shape or tensor.dtype not in TENSOR_DTYPES:
            return None
        return {"type": "binary", "codec": tensor.codec, "dtype": tensor.dtype, "shape": list(tensor.shape)}
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    ddl = _ddl(kind)
    if ddl is None:
        return None
    if shape:
        return {"type": f"array<{ddl}>", "shape": shape}
    # A Unischema's uint8 lies in an int32: the tensor is of the narrower type, which is checked.
    if (
        tensor is not None
        and tensor.dtype in TENSOR_DTYPES
        and (pa.types.is_integer(kind) or pa.types.is_floating(kind))
    ):
        return {"type": ddl, "dtype": tensor.dtype}
    return {"type": ddl}


def missing_for(column: pa.Field) -> str:
    """What a column that `field_spec` cannot feed needs in the schema, or why it cannot be fed at all."""
    tensor, kind = TensorColumn.of(column), column.type
    if tensor is not None and tensor.encoded:
        if tensor.dtype not in TENSOR_DTYPES:
            return f"{tensor.dtype} has no tensor: write the column in another type"
        stored = f"type: binary, codec: {tensor.codec}, dtype: {tensor.dtype}"
        return f"{stored}, its shape, and pad: VALUE where sizes differ"
    if is_vector(kind):
        return "type: vector and shape: [size]"
    if pa.types.is_struct(kind):
        return "its fields by dotted names"
    depth, element = 0, kind
    while pa.types.is_list(element) or pa.types.is_large_list(element) or pa.types.is_fixed_size_list(element):
        depth, element = depth + 1, element.value_type
    ddl = _ddl(element)
    if depth and ddl is not None:
        pad = ", and pad: VALUE where lengths differ" if depth == 1 else ""
        return f"type: {'array<' * depth}{ddl}{'>' * depth} and its shape{pad}"
    return f"{element} has no tensor: write the column in another type"


def stored_as(column: pa.Field) -> str:
    """A column's type, or for an encoded tensor its codec, dtype and shape."""
    tensor = TensorColumn.of(column)
    return str(tensor) if tensor is not None and tensor.encoded else str(column.type)


def _ddl(kind: pa.DataType) -> str | None:
    """The Spark type that holds all values of a flat Arrow type."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return _DDL.get(str(kind))


_DDL = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "uint8": "smallint",
    "uint16": "int",
    "uint32": "bigint",
    "halffloat": "float",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "binary": "binary",
    "large_binary": "binary",
    "date32[day]": "date",
}
