"""Parquet footers, read side by side and kept small: what planning needs of each, and nothing else.

A footer as pyarrow holds it costs a few hundred bytes a column of a row group; a table of a million row
groups would fill the driver's memory with them. Of thousands of files, Spark's executors read the footers.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dl_on_spark.errors import TableError
from dl_on_spark.lake.snapshot import Counts, DataFile
from dl_on_spark.lake.storage import Location, locate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MANY_FILES = 4_000
_TAIL_BYTES = 64 * 1024
_THREADS = 16
_FILES_OF_A_TASK = 500
# Least value, greatest value (None: not known) and nulls (None: not known) of a column in a row group.
ColumnStatistics = tuple[Any, Any, int | None]


@dataclass(frozen=True)
class Footer:
    """One file's row groups. ``rows``, ``bytes`` (uncompressed): int64 (row groups,). ``statistics``: of each row
    group (None where it has none), by column. ``digest``: of the footer's bytes, which describe offsets and sizes."""

    schema: pa.Schema
    rows: Counts
    bytes: Counts
    statistics: dict[str, list[ColumnStatistics | None]]
    digest: str


def read_footers(
    place: Location, files: Sequence[DataFile], columns: Iterable[str], spark: SparkSession | None = None
) -> list[Footer]:
    """The footer of each file, in order, with the statistics of `columns` (dotted names, letter case ignored).

    With `spark`, those of more than a few thousand files are read by its executors. Raises `TableError` naming the
    file that cannot be read.
    """
    names = frozenset(name.lower() for name in columns)
    if spark is not None and len(files) > MANY_FILES:
        footers: Iterable[Footer] = _read_by_executors(spark, place, files, names)
    else:
        footers = _read_here(place, files, names)
    known: list[pa.Schema] = []  # a table's files mostly share one
    return [_with_shared_schema(footer, known) for footer in footers]


def _with_shared_schema(footer: Footer, known: list[pa.Schema]) -> Footer:
    for schema in known:
        if schema.equals(footer.schema):
            return replace(footer, schema=schema)
    known.append(footer.schema)
    return footer


def _read_here(place: Location, files: Sequence[DataFile], names: frozenset[str]) -> Iterator[Footer]:
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda file: _read(place, file, names), files)


def _read_by_executors(
    spark: SparkSession, place: Location, files: Sequence[DataFile], names: frozenset[str]
) -> Iterator[Footer]:
    uri = place.uri
    rows = [(i, file.path, file.size) for i, file in enumerate(files)]
    listed = spark.createDataFrame(rows, "i int, path string, size long")

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        here = locate(uri)
        for batch in batches:
            some = [DataFile(row["path"], row["size"]) for row in batch.to_pylist()]
            found: list[bytes | None] = [None] * len(some)
            told = found.copy()
            try:
                found = [pickle.dumps(footer) for footer in _read_here(here, some, names)]
            except TableError as error:  # as a value: an exception of a task reaches the driver as text
                told[0] = pickle.dumps((error.message, error.fix))
            columns = [batch.column(0), pa.array(found, pa.binary()), pa.array(told, pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, ["i", "footer", "error"])

    parts = math.ceil(len(files) / _FILES_OF_A_TASK)
    read = listed.repartition(parts, "i").mapInArrow(task, "i int, footer binary, error binary").collect()
    for row in read:
        if row.error is not None:
            message, fix = pickle.loads(row.error)
            raise TableError(message, fix=fix)
    footers = {row.i: row.footer for row in read}
    return (pickle.loads(footers.pop(i)) for i in range(len(files)))


def _read(place: Location, file: DataFile, names: frozenset[str]) -> Footer:
    name = f"{place.uri}: {file.path or 'the file'}"
    path = f"{place.path}/{file.path}" if file.path else place.path
    try:
        with place.filesystem.open_input_file(path) as source:
            tail = source.read_at(min(_TAIL_BYTES, file.size), max(0, file.size - _TAIL_BYTES))
            magic, length = tail[-4:], int.from_bytes(tail[-8:-4], "little")
            if magic == b"PARE":
                raise TableError(f"{name} has an encrypted footer.", fix="Give a table that is not encrypted.")
            if magic != b"PAR1" or length + 8 > file.size:
                raise TableError(
                    f"{name} is not a complete Parquet file ({file.size} bytes).",
                    fix="Write it again, or move what is no data out of the table's folder.",
                )
            if length + 8 > len(tail):
                tail = source.read_at(length + 8, file.size - length - 8)
        text = tail[-length - 8 :]
        # INT96, Spark's default for timestamps: as nanoseconds, years before 1677 and after 2262 would wrap.
        reader = pq.ParquetFile(pa.BufferReader(text), coerce_int96_timestamp_unit="us")
    except FileNotFoundError as error:
        raise TableError(
            f"{name} is not there any more.",
            fix="Read the newest version: an old one loses its files to VACUUM and to the expiry of snapshots.",
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise TableError(f"{name} cannot be read: {error}.", fix="Check the file and its permissions.") from error
    try:
        schema = reader.schema_arrow.remove_metadata()
    except (pa.ArrowException, ValueError) as error:
        raise TableError(
            f"{name}: its schema is not one Arrow knows: {error}.", fix="Write the file again with Spark or pyarrow."
        ) from error
    # Not `metadata.schema`: it and the footer would hold each other until a rare garbage collection.
    metadata = reader.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return Footer(
        schema,
        np.array([group.num_rows for group in groups], np.int64),
        np.array([group.total_byte_size for group in groups], np.int64),
        _statistics(groups, names),
        hashlib.sha256(text).hexdigest(),
    )


def _statistics(groups: list[Any], names: frozenset[str]) -> dict[str, list[ColumnStatistics | None]]:
    """Of the filter's columns alone: a wide table's others are not looked at."""
    first = groups[0] if groups and names else None
    paths = [] if first is None else [first.column(i).path_in_schema for i in range(first.num_columns)]
    return {
        path: [_of_column(group.column(i).statistics) for group in groups]
        for i, path in enumerate(paths)
        if path.lower() in names
    }


def _of_column(found: Any) -> ColumnStatistics | None:
    if found is None:
        return None
    low, high = (found.min, found.max) if found.has_min_max else (None, None)
    return low, high, found.null_count if found.has_null_count else None
