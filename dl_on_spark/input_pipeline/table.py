"""A table that can be read into memory, batch by batch, without Spark and without a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark import lake
from dl_on_spark.errors import SchemaError
from dl_on_spark.input_pipeline.plan import SamplePlan
from dl_on_spark.input_pipeline.preprocess import Columns, Preprocessor
from dl_on_spark.input_pipeline.reader import RankReader
from dl_on_spark.input_pipeline.tf_dataset import dataset_of_blocks
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.snapshot import Snapshot
from dl_on_spark.lake.table import Table

if TYPE_CHECKING:
    import tensorflow as tf

    from dl_on_spark.lake.statistics import Statistics


class ReadableTable(Table):
    """A `Table` with `batches` and `to_tf_dataset`; `where` and `select` keep these."""

    def batches(
        self,
        batch_size: int,
        schema: Schema | None = None,
        seed: int | None = None,
        *,
        statistics: Statistics | None = None,
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Each row once, in batches of ``batch_size`` rows: dict of column name -> array.

        ``schema``: types, nulls and preprocessing (default: all columns as they are; a null is an
        error). ``seed``: shuffle; None keeps the file order.
        """
        snapshot = self.snapshot()
        chosen = schema_of(snapshot.schema, snapshot.uri) if schema is None else schema
        with RankReader(snapshot, _plan(snapshot, batch_size, seed), chosen, statistics, 0, 1) as reader:
            yield from reader.columns(0)

    def to_tf_dataset(
        self,
        batch_size: int,
        schema: Schema,
        seed: int | None = None,
        *,
        statistics: Statistics | None = None,
    ) -> tf.data.Dataset:
        """Batches ``(x, y)`` or ``(x, y, weights)`` for a single process; the table is pinned now.

        With a ``seed``, each iterator over the dataset is the next epoch, in its own order.
        """
        snapshot = self.snapshot()
        plan, epochs = _plan(snapshot, batch_size, seed), iter(range(2**62))

        def blocks() -> Iterator[Columns]:
            with RankReader(snapshot, plan, schema, statistics, 0, 1) as reader:
                yield from reader.blocks(next(epochs))

        return dataset_of_blocks(blocks, Preprocessor(schema, statistics), plan.steps_per_epoch)


def open_table(uri: str | os.PathLike[str], format: str = "auto", version: str | int | None = None) -> ReadableTable:
    """The table at ``uri`` (a local path, file:// or s3://): a folder of Parquet files or one file."""
    table = lake.open_table(uri, format, version)
    return ReadableTable(**{field.name: getattr(table, field.name) for field in fields(Table)})


def schema_of(arrow_schema: pa.Schema, uri: str) -> Schema:
    """A schema that feeds every column as it is stored.

    Raises `SchemaError` naming the columns whose type has no tensor.
    """
    columns: dict[str, dict[str, Any]] = {}
    refused = []
    for column in arrow_schema:
        kind, shape = column.type, []
        while pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            kind = kind.value_type
        ddl = _ddl(kind)
        if ddl is None:
            refused.append(f"{column.name!r} ({column.type})")
            continue
        columns[column.name] = {"type": f"array<{ddl}>" if shape else ddl, "role": "feature"}
        if shape:
            columns[column.name]["shape"] = shape
    if refused:
        raise SchemaError(
            f"{uri}: columns {', '.join(refused)} cannot become tensors of one shape.",
            fix="Leave them out with `select`, or give a schema with a `shape` for lists.",
        )
    return Schema.from_dict({"name": "as_stored", "fields": columns})


def _plan(snapshot: Snapshot, batch_size: int, seed: int | None) -> SamplePlan:
    return SamplePlan.create(
        np.asarray(snapshot.row_groups.rows),
        num_workers=1,
        global_batch_size=batch_size,
        seed=seed,
        canonical_shards=1 if seed is None else None,  # one stream is the file order
    )


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
