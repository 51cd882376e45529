"""A table on the lake: opened, pinned, described by a schema, checked and written."""

from __future__ import annotations

from dl_on_spark.lake.row_groups import RowGroupDecoder
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.snapshot import DataFile, RowGroups, Snapshot
from dl_on_spark.lake.statistics import Statistics, compute_statistics
from dl_on_spark.lake.table import Table, open_table
from dl_on_spark.lake.tensor_writes import describe_tensors, write_tensors

__all__ = [
    "DataFile",
    "Field",
    "RowGroupDecoder",
    "RowGroups",
    "Schema",
    "Snapshot",
    "Statistics",
    "Table",
    "compute_statistics",
    "describe_tensors",
    "open_table",
    "write_tensors",
]
