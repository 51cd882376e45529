"""Atomic, idempotent replacement of a table's partitions.

Spark writes the new partitions into a staging folder inside the table, which readers ignore; then each
takes the place of the old one in a single step (`lake.staging`). A killed write leaves the old day or
the new one, never a part of either. The same rows give the same files: rows are sorted, names are fixed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from dl_on_spark.errors import InputError, TableError
from dl_on_spark.lake.ddl import quoted
from dl_on_spark.lake.formats.parquet_footer import sort_encodings
from dl_on_spark.lake.staging import staging, sync_folder
from dl_on_spark.lake.storage import PathLike, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
# The letters that Spark writes as %XX in a folder's name (ExternalCatalogUtils.escapePathName).
_ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(code) for code in range(1, 32)}
_FILE_NUMBER = re.compile(r"part-(\d+)-.*[.-]c(\d+)\.")


@dataclass(frozen=True)
class WrittenPartition:
    """One partition folder as it was published: ``name`` like ``date=2013-06-30``."""

    name: str
    rows: int
    bytes: int
    files: int


@dataclass(frozen=True)
class WriteReport:
    """What a write published, by partition."""

    uri: str
    partitions: tuple[WrittenPartition, ...]

    @property
    def rows(self) -> int:
        """Rows of all partitions."""
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(partition.bytes for partition in self.partitions)

    @property
    def files(self) -> int:
        """Files of all partitions."""
        return sum(partition.files for partition in self.partitions)


def write_partitions(
    rows: DataFrame,
    uri: PathLike,
    *,
    partition_by: str,
    sort_by: Sequence[str] = (),
    rows_per_file: int = 1_000_000,
    rows_per_group: int | None = None,
    replaces: Iterable[object] = (),
) -> WriteReport:
    """Replace the partitions of `uri` that `rows` holds; all others stay.

    ``replaces``: partition values that this write stands for; one without rows loses its folder.

    ``partition_by``: the column that names the folders. ``sort_by``: order of rows within a file; the
    other columns break ties, so that the order does not depend on how Spark ran. A partition has
    ``ceil(rows / rows_per_file)`` files, in row groups of at most ``rows_per_group`` rows (default:
    Parquet's 128 MB). Raises `InputError` for a table that is not on a file system with rename or a
    column that is not in `rows`; a failing write leaves the table as it was.
    """
    for name in (partition_by, *sort_by):
        if name not in rows.columns:
            raise InputError(
                f"the rows for {os.fspath(uri)} have no column {name!r} (columns: {', '.join(rows.columns)}).",
                fix="Name a column of the rows in partition_by and sort_by.",
            )
    root = _local_root(uri)
    with staging(root) as staged:
        _write_with_spark(rows, staged.new, partition_by, sort_by, rows_per_file, rows_per_group)
        written = [_finish(folder) for folder in sorted(staged.new.iterdir()) if folder.is_dir()]
        names = [partition.name for partition in written]
        staged.commit(names, sorted({_folder_name(partition_by, value) for value in replaces} - set(names)))
    return WriteReport(os.fspath(uri), tuple(written))


def check_root(uri: PathLike) -> Path:
    """The local folder of the table `uri`, which need not be there yet; makes nothing.

    Raises `InputError` where partitions cannot be written to it.
    """
    root = local_path(uri)
    if root is None:
        raise InputError(
            f"{os.fspath(uri)}: partitions are replaced by rename, which this file system does not have.",
            fix="Write the table to a local or mounted folder.",
        )
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    if not there.is_dir():
        raise TableError(f"{root}: {there} is a file, not a folder.", fix="Choose another path for the table.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TableError(f"{root}: {there} cannot be written.", fix="Choose another path, or mend its permissions.")
    return root


def _local_root(uri: PathLike) -> Path:
    root = check_root(uri)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TableError(f"{root} cannot be made: {error}.", fix="Check the path and its permissions.") from error
    return root


def _write_with_spark(
    rows: DataFrame,
    folder: Path,
    partition_by: str,
    sort_by: Sequence[str],
    rows_per_file: int,
    rows_per_group: int | None,
) -> None:
    from pyspark.sql.types import MapType

    ties = [
        field.name
        for field in rows.schema
        if field.name not in {partition_by, *sort_by} and not isinstance(field.dataType, MapType)
    ]
    order = [quoted(name) for name in (partition_by, *sort_by, *ties)]
    writer = (
        rows.repartition(order[0])
        .sortWithinPartitions(*order)
        .write.option("maxRecordsPerFile", rows_per_file)
        .option("compression", "snappy")
    )
    if rows_per_group is not None:
        writer = writer.option("parquet.block.row.count.limit", rows_per_group)
    # Hadoop takes the path of a URI as it stands: a space written as %20 would be another folder.
    writer.partitionBy(partition_by).parquet(f"file:{folder}")


def _folder_name(column: str, value: object) -> str:
    """The folder that Spark makes for a partition value."""
    text = _HIVE_NULL if value is None or value == "" else str(value)
    escaped = (
        "".join(f"%{ord(letter):02X}" if letter in _ESCAPED else letter for letter in part) for part in (column, text)
    )
    return "=".join(escaped)


def _finish(folder: Path) -> WrittenPartition:
    """Give a partition's files their final names and bytes, and count them; drops Spark's checksum files."""
    numbered = {}
    for path in folder.iterdir():
        found = _FILE_NUMBER.match(path.name)
        if found is None:
            path.unlink()
        else:
            numbered[int(found[1]), int(found[2])] = path
    rows = size = 0
    for number, (_, path) in enumerate(sorted(numbered.items())):
        rows += pq.read_metadata(path).num_rows
        size += path.stat().st_size
        sort_encodings(path)
        path.rename(folder / f"part-{number:05d}.parquet")
    sync_folder(folder)
    return WrittenPartition(folder.name, rows, size, len(numbered))
