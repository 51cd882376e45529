"""Rows become batches: the sample plan, the Arrow reader, preprocessing, blocks of tensors and tf.data."""

from __future__ import annotations

from dl_on_spark.input_pipeline.batch_sources import describe_batch
from dl_on_spark.input_pipeline.block_feed import BlockFeed
from dl_on_spark.input_pipeline.plan import Cursor, SamplePlan
from dl_on_spark.input_pipeline.preprocess import Preprocessor
from dl_on_spark.input_pipeline.reader import RankReader
from dl_on_spark.input_pipeline.table import ReadableTable, open_table
from dl_on_spark.input_pipeline.tf_dataset import to_tf_dataset

__all__ = [
    "BlockFeed",
    "Cursor",
    "Preprocessor",
    "RankReader",
    "ReadableTable",
    "SamplePlan",
    "describe_batch",
    "open_table",
    "to_tf_dataset",
]
