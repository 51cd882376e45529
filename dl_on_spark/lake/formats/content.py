"""What a format says of a table: its files with their footers, and one schema for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from dl_on_spark.lake.formats.footers import Footer
from dl_on_spark.lake.snapshot import DataFile


@dataclass(frozen=True)
class Content:
    """Files and footers in the same order; ``schema`` has the data's columns and then the partition's.

    ``root``: where the files' paths begin, when that is not the table's address.
    """

    files: tuple[DataFile, ...]
    footers: tuple[Footer, ...]
    schema: pa.Schema
    partition_names: tuple[str, ...]
    version: str | None = None
    root: str | None = None
