"""A schema as petastorm's Unischema: tensors in columns, each with the codec that stores it."""

from __future__ import annotations

import importlib.util
import sys
from decimal import Decimal
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from dl_on_spark.errors import MissingExtraError
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.unischema import numpy_name, row_shape

_REMOVED = {"filesystem": ("FileSystem", "LocalFileSystem"), "hdfs": ("HadoopFileSystem",)}


def unischema_of(schema: Schema) -> Any:
    """petastorm's Unischema of all fields. Raises `MissingExtraError` where petastorm is not installed."""
    _stand_in_for_removed_modules()
    try:
        from petastorm.unischema import Unischema, UnischemaField
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "petastorm":
            raise  # petastorm is there, and one of its own dependencies is not
        raise MissingExtraError("petastorm", "petastorm") from error
    fields = [
        UnischemaField(field.name, _numpy_type(field), row_shape(field), _codec(field), field.nullable)
        for field in schema.fields
    ]
    return Unischema(schema.name, fields)


def _stand_in_for_removed_modules() -> None:
    """petastorm imports classes of two modules that newer pyarrow no longer has; its codecs do not use them."""
    for name, classes in _REMOVED.items():
        full = f"pyarrow.{name}"
        if full not in sys.modules and importlib.util.find_spec(full) is None:
            module = ModuleType(full)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            sys.modules[full] = module
            setattr(pa, name, module)


def _numpy_type(field: Field) -> Any:
    name = numpy_name(field)
    return Decimal if name == "decimal" else np.dtype(name).type


def _codec(field: Field) -> Any:
    from petastorm import codecs

    if field.codec == "ndarray":
        return codecs.NdarrayCodec()
    if field.codec == "compressed_ndarray":
        return codecs.CompressedNdarrayCodec()
    if field.codec in {"png", "jpeg"}:
        return codecs.CompressedImageCodec(field.codec)
    return codecs.ScalarCodec(Schema("", [field]).to_spark().fields[0].dataType)
