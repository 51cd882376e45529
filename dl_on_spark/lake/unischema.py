"""petastorm's Unischema as plain data, read from and written to the pickle that its tables carry.

The pickle is never loaded: `restricted_pickle` reads it, and only the names that a Unischema consists of are let in.
petastorm's own reader lets all of ``builtins`` in, so a table could run code there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.lake.restricted_pickle import Global, Instance, PickleError, dump, load
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.tensor_columns import TENSOR_CODECS

# Names of numpy's scalar types, by what they are called in a schema; other versions of numpy had other names.
_DTYPES = {
    **{name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    **{name: name for name in ("float16", "float32", "float64", "complex64", "complex128", "datetime64", "bool")},
    **{"bool_": "bool", "float_": "float64", "int_": "int64", "longlong": "int64", "ulonglong": "uint64"},
    **{"str_": "string", "unicode_": "string", "bytes_": "binary", "string_": "binary", "object_": "object"},
}
_SPARK_TYPES = {
    *("ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType", "BooleanType", "DecimalType"),
    *("StringType", "BinaryType", "DateType", "TimestampType", "TimestampNTZType", "ArrayType", "VarcharType"),
}
_CODECS = {
    "ScalarCodec": "scalar",
    "NdarrayCodec": "ndarray",
    "CompressedNdarrayCodec": "compressed_ndarray",
    "CompressedImageCodec": "image",
}
_NAMES: dict[str, set[str]] = {
    "petastorm.unischema": {"Unischema", "UnischemaField"},
    "petastorm.codecs": set(_CODECS),
    "numpy": {*_DTYPES, "dtype"},
    "pyspark.sql.types": _SPARK_TYPES,
    "pyspark.serializers": {"_restore"},  # what older PySpark made of a named tuple
    "collections": {"OrderedDict"},
    "decimal": {"Decimal"},
    "copyreg": {"_reconstructor"},
    "builtins": {"object", "tuple", "str", "bytes", "int", "float", "bool"},
}
_PYTHON_2 = {"copy_reg": "copyreg", "__builtin__": "builtins"}
# petastorm's package before it was published.
_OLD_PACKAGE = re.compile(r"av\.(?:experimental\.deepdrive|ml)\.dataset_toolkit\.")
_DTYPE_CODE = re.compile(r"[<>=|]?[?a-zA-Z][0-9]{0,2}")
_IMAGES = {"png": "png", "jpeg": "jpeg", "jpg": "jpeg"}


@dataclass(frozen=True)
class UnischemaField:
    """One field: ``dtype`` as numpy calls it ("string", "binary", "decimal" for those); a None in ``shape`` is any
    size; ``codec``: scalar, ndarray, compressed_ndarray, png, jpeg, or None (stored as it is)."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    codec: str | None
    nullable: bool


@dataclass(frozen=True)
class Unischema:
    """The fields of a petastorm table, in order."""

    name: str
    fields: tuple[UnischemaField, ...]


def read_unischema(data: bytes, uri: str) -> Unischema:
    """The Unischema in a table's pickle. Raises `TableError` for any name that a Unischema does not consist of."""
    try:
        value = load(data, lambda found: found.name in _NAMES.get(_module(found.module), ()))
        return _unischema(value)
    except PickleError as error:
        raise TableError(
            f"{uri}: its Unischema is a pickle that cannot be read as plain data: {error}. Nothing of it was run.",
            fix="Read the columns as they are stored with format='parquet', or write the table with petastorm's own "
            "field types and codecs.",
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise TableError(
            f"{uri}: its Unischema is not one that petastorm writes ({error}).",
            fix="Read the columns as they are stored with format='parquet'.",
        ) from error


def write_unischema(schema: Schema) -> bytes:
    """The pickle from which petastorm makes the Unischema of all fields of `schema`.

    Raises `SchemaError` for a field that petastorm has no codec for.
    """
    fields: dict[Any, Any] = {field.name: _pickled_field(field, schema.source) for field in schema.fields}
    ordered = Instance(Global("collections", "OrderedDict"), (), items=fields)
    state = {"_name": schema.name or "schema", "_fields": ordered, **fields}
    return dump(Instance(Global("petastorm.unischema", "Unischema"), (), state))


def _module(name: str) -> str:
    return _OLD_PACKAGE.sub("petastorm.", _PYTHON_2.get(name, name))


def _class_of(value: Any) -> str:
    """The class of an instance, whichever way its pickle makes it."""
    if not isinstance(value, Instance):
        raise TypeError(f"{type(value).__name__} where an object should be")
    if value.of.name == "_reconstructor":
        return str(value.args[0].name)
    return str(value.args[0]) if value.of.name == "_restore" else value.of.name


def _unischema(value: Any) -> Unischema:
    if _class_of(value) != "Unischema":
        raise TypeError(f"it is of {_class_of(value)}")
    fields = value.state["_fields"]
    named = fields.items.values() if isinstance(fields, Instance) else fields.values()
    return Unischema(str(value.state["_name"]), tuple(_field(each) for each in named))


def _field(value: Any) -> UnischemaField:
    if _class_of(value) != "UnischemaField":
        raise TypeError(f"a field is of {_class_of(value)}")
    # How a named tuple is made: class(*values), or by way of tuple(values), or of its name and the names of its values.
    values: tuple[Any, ...] = value.args[2] if value.of.name in {"_reconstructor", "_restore"} else value.args
    defaults: tuple[Any, ...] = (None, False)  # of codec and nullable
    name, dtype, shape, codec, nullable = values + defaults[len(values) - 3 :]
    sizes = tuple(None if size is None else int(size) for size in shape)
    return UnischemaField(str(name), _dtype(dtype), sizes, _codec(codec), bool(nullable))


def _dtype(value: Any) -> str:
    if isinstance(value, Instance) and value.of.name == "dtype":
        code = str(value.args[0])
        if not _DTYPE_CODE.fullmatch(code):
            raise ValueError(f"dtype {code!r}")
        kind = np.dtype(code)
        return {"U": "string", "S": "binary", "M": "datetime64"}.get(kind.kind, kind.name)
    if not isinstance(value, Global):
        raise TypeError("a field without a type")
    if value.module == "numpy":
        return _DTYPES[value.name]
    plain = {"Decimal": "decimal", "str": "string", "bytes": "binary", "int": "int64", "float": "float64"}
    return plain.get(value.name, value.name)


def _codec(value: Any) -> str | None:
    if value is None:
        return None
    codec = _CODECS[_class_of(value)]
    return _IMAGES[value.state["_image_codec"].lstrip(".")] if codec == "image" else codec


def _pickled_field(field: Field, source: str) -> Instance:
    kind = field.arrow_type
    if pa.types.is_nested(kind):
        raise SchemaError(
            f"{source}: field {field.name!r} of type {field.type} has no codec in petastorm.",
            fix="Store it as a tensor: type: binary, codec: ndarray, with dtype and shape.",
        )
    dtype = numpy_name(field)
    of = Global("decimal", "Decimal") if dtype == "decimal" else Global("numpy", dtype)
    shape = row_shape(field) if field.codec in TENSOR_CODECS else ()
    values = (field.name, of, shape, _pickled_codec(field), field.nullable)
    return Instance(Global("petastorm.unischema", "UnischemaField"), values)


def row_shape(field: Field) -> tuple[int | None, ...]:
    """A row's shape in the Unischema: any size where smaller tensors are padded."""
    shape = field.shape or ()
    return shape if field.pad is None else (None,) * len(shape)


def numpy_name(field: Field) -> str:
    """A field's type in the Unischema: the name of a scalar type that every NumPy has, or "decimal"."""
    name = field.tensor_spec()[1] if field.codec in TENSOR_CODECS else _scalar_name(field)
    return "bool_" if name == "bool" else name


def _scalar_name(field: Field) -> str:
    kind = field.arrow_type
    if pa.types.is_decimal(kind):
        return "decimal"
    if pa.types.is_string(kind):
        return "str_"
    if pa.types.is_binary(kind):
        return "bytes_"
    if pa.types.is_temporal(kind):
        return "datetime64"
    return field.dtype or np.dtype(kind.to_pandas_dtype()).name


def _pickled_codec(field: Field) -> Instance:
    def codec(name: str, state: Any = None) -> Instance:
        return Instance(Global("petastorm.codecs", name), (), state)

    if field.codec in {"png", "jpeg"}:
        return codec("CompressedImageCodec", {"_image_codec": f".{field.codec}", "_quality": 80})
    if field.codec in {"ndarray", "compressed_ndarray"}:
        return codec("NdarrayCodec" if field.codec == "ndarray" else "CompressedNdarrayCodec")
    kind = field.arrow_type
    state = None
    if pa.types.is_decimal(kind):
        state = {"precision": kind.precision, "scale": kind.scale, "hasPrecisionInfo": True}
    name = "DecimalType" if state else _SPARK_NAMES[str(kind)]
    return codec("ScalarCodec", {"_spark_type": Instance(Global("pyspark.sql.types", name), (), state)})


_SPARK_NAMES = {
    "bool": "BooleanType",
    "int8": "ByteType",
    "int16": "ShortType",
    "int32": "IntegerType",
    "int64": "LongType",
    "float": "FloatType",
    "double": "DoubleType",
    "string": "StringType",
    "binary": "BinaryType",
    "date32[day]": "DateType",
    "timestamp[us, tz=UTC]": "TimestampType",
    "timestamp[us]": "TimestampType",
}
