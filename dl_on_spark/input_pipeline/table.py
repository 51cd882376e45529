"""A table that can be read into memory, batch by batch, without Spark and without a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark import lake
from dl_on_spark.input_pipeline.feedable import schema_of
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


def _plan(snapshot: Snapshot, batch_size: int, seed: int | None) -> SamplePlan:
    return SamplePlan.create(
        np.asarray(snapshot.row_groups.rows),
        num_workers=1,
        global_batch_size=batch_size,
        seed=seed,
        canonical_shards=1 if seed is None else None,  # one stream is the file order
    )
