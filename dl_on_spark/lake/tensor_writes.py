"""Tables with tensor columns that petastorm can read: our rows, its codecs, its ``_common_metadata``."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dl_on_spark.errors import InputError, SchemaError
from dl_on_spark.lake import codecs
from dl_on_spark.lake.formats import parquet
from dl_on_spark.lake.formats.petastorm import COMMON_METADATA, ROW_GROUPS_KEY, UNISCHEMA_KEY
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.storage import PathLike, exists, join, list_files, locate, write_bytes
from dl_on_spark.lake.tensor_columns import TENSOR_CODECS
from dl_on_spark.lake.unischema import write_unischema

_ROW_GROUP_ROWS = 1_024


def write_tensors(
    uri: PathLike,
    schema: Schema,
    batches: Iterable[Mapping[str, Any]],
    *,
    rows_per_group: int = _ROW_GROUP_ROWS,
) -> int:
    """Write a new table at `uri`, one file a batch; returns its rows.

    A batch has a value for each field of `schema`: for an encoded tensor an array (rows, \\*shape), or arrays one by
    one with None for a null; for other fields a sequence or array (rows,). The metadata that makes it a petastorm
    table is written last. Raises `InputError` where there are files already, `SchemaError` naming column and row for
    a value that does not fit.
    """
    name = os.fspath(uri)
    if exists(uri) and list_files(uri):
        raise InputError(f"{name} holds files already.", fix="Write a new table beside it, or delete it first.")
    write_unischema(schema)  # before any row is written: refuses what petastorm has no codec for
    rows = 0
    for number, batch in enumerate(batches):
        table = _encoded(batch, schema)
        file = io.BytesIO()
        pq.write_table(table, file, row_group_size=rows_per_group, use_dictionary=_repetitive(schema))
        write_bytes(join(uri, f"part-{number:05d}.parquet"), file.getbuffer())
        rows += table.num_rows
    describe_tensors(uri, schema)
    return rows


def describe_tensors(uri: PathLike, schema: Schema) -> None:
    """Make the Parquet files at `uri`, which Spark may have written, a table that petastorm can read.

    Writes ``_common_metadata``: the Unischema of `schema` and the row groups of each file. Raises `SchemaError`
    where the files' columns do not fit the schema.
    """
    place = locate(uri)
    content = parquet.resolve(place, None)
    schema.check(content.schema, place.uri)
    counts = {file.path: len(footer.rows) for file, footer in zip(content.files, content.footers, strict=True)}
    stored = pa.schema([field for field in content.schema if field.name not in content.partition_names])
    told = {UNISCHEMA_KEY: write_unischema(schema), ROW_GROUPS_KEY: json.dumps(counts).encode()}
    file = io.BytesIO()
    pq.write_metadata(stored.with_metadata(told), file)
    write_bytes(join(uri, COMMON_METADATA), file.getbuffer())


def _encoded(batch: Mapping[str, Any], schema: Schema) -> pa.Table:
    missing = [field.name for field in schema.fields if field.name not in batch]
    if missing:
        raise SchemaError(
            f"a batch of {schema.source} has no values of {missing[0]!r} (it has: {', '.join(batch)}).",
            fix="Give each batch a value for every field, None for a null.",
        )
    columns = [_column(field, batch[field.name]) for field in schema.fields]
    rows = {field.name: len(column) for field, column in zip(schema.fields, columns, strict=True)}
    if len(set(rows.values())) > 1:
        raise SchemaError(f"a batch's columns have different lengths: {rows}.", fix="Give all columns the same rows.")
    return pa.table(columns, schema=schema.to_arrow())


def _column(field: Field, values: Any) -> Any:
    where = f"Column {field.name!r}"
    if field.codec in TENSOR_CODECS:
        column: Any = codecs.encode(values, codecs.TensorSpec.of(field), where)
    else:
        try:
            column = pa.array(values, field.arrow_type)
        except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
            raise SchemaError(
                f"{where}: a value does not fit {field.type} ({error}).", fix="Convert it, or correct the schema."
            ) from error
    if column.null_count and not field.nullable:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise SchemaError(f"{where}, row {row}: a null, and it is not nullable.", fix="Make the field nullable.")
    return column


def _repetitive(schema: Schema) -> list[str]:
    """Columns that a dictionary may shorten: not the tensors, whose cells all differ."""
    return [field.name for field in schema.fields if field.codec not in TENSOR_CODECS]
