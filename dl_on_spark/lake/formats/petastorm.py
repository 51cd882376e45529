"""petastorm: a folder of Parquet files whose ``_common_metadata`` holds a Unischema.

The files are read as plain Parquet. What the Unischema says of a column, its codec, dtype and shape, becomes metadata
of the column (`TensorColumn`), and so part of the pinned snapshot; petastorm itself is not needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from dl_on_spark.errors import TableError
from dl_on_spark.lake.formats import parquet
from dl_on_spark.lake.formats.content import Content
from dl_on_spark.lake.storage import Location
from dl_on_spark.lake.tensor_columns import TensorColumn
from dl_on_spark.lake.unischema import Unischema, UnischemaField, read_unischema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
COMMON_METADATA = "_common_metadata"


def recognizes(place: Location) -> bool:
    """Whether there is a ``_common_metadata`` with a Unischema; other writers leave such files without one."""
    return _pickled(place) is not None


def resolve(
    place: Location, version: str | None, predicate: str | None = None, spark: SparkSession | None = None
) -> Content:
    """As `parquet.resolve`; the schema's columns carry what the Unischema says of them.

    Raises `TableError` for a Unischema that is not plain data, or names a column that the files lack.
    """
    pickled = _pickled(place)
    if pickled is None:
        raise TableError(
            f"{place.uri}: there is no {COMMON_METADATA} with a Unischema in it.",
            fix="Leave the format out, or write the table inside petastorm's materialize_dataset.",
        )
    unischema = read_unischema(pickled, place.uri)
    text = {field.name for field in unischema.fields if field.dtype == "string"}
    content = parquet.resolve(place, version, predicate, spark, text_partitions=text)
    return replace(content, schema=_described(content.schema, unischema, place.uri))


def _pickled(place: Location) -> bytes | None:
    path = f"{place.path}/{COMMON_METADATA}"
    if place.filesystem.get_file_info(path).type != pafs.FileType.File:
        return None
    try:
        with place.filesystem.open_input_file(path) as source:
            metadata = pq.read_metadata(source).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise TableError(
            f"{place.uri}: {COMMON_METADATA} cannot be read: {' '.join(str(error).split()).rstrip('.')}.",
            fix="Write it again with petastorm-generate-metadata.py, or read the table with format='parquet'.",
        ) from error
    found: bytes | None = metadata.get(UNISCHEMA_KEY)
    return found


def _described(schema: pa.Schema, unischema: Unischema, uri: str) -> pa.Schema:
    for field in unischema.fields:
        at = schema.get_field_index(field.name)
        if at < 0:
            raise TableError(
                f"{uri}: the Unischema {unischema.name!r} has a field {field.name!r}, and the files have no such "
                f"column (columns: {', '.join(schema.names)}).",
                fix="Write the table's metadata again with the Unischema of its rows, or use format='parquet'.",
            )
        schema = schema.set(at, _column(schema.field(at), field, uri))
    return schema


def _column(stored: pa.Field, field: UnischemaField, uri: str) -> pa.Field:
    column = TensorColumn(field.codec, field.dtype, field.shape)
    binary = any(is_(stored.type) for is_ in (pa.types.is_binary, pa.types.is_large_binary))
    if column.encoded and not binary:
        raise TableError(
            f"{uri}: the Unischema stores {field.name!r} with the codec {field.codec}, and in the files it is "
            f"{stored.type}.",
            fix="Write the table's metadata again with the Unischema of its rows, or use format='parquet'.",
        )
    return column.on(stored)
