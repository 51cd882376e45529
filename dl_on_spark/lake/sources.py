"""Raw tables as the ETL reads them: the files of some days, with their columns by name."""

from __future__ import annotations

import csv
import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.storage import join, list_files, local_path, locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_HEADER_BYTES = 64 * 1024
SOURCE_FILE = "source_file"
# The text of a row that has more or fewer values than its header, or is no JSON; null for all others.
CORRUPT = "_corrupt_record"


@dataclass(frozen=True)
class Source:
    """One raw table. ``partition``: its hive column of days; ``lookback_days``: days read before the first."""

    name: str
    uri: str
    format: str = "csv"
    schema: Schema | None = None
    partition: str | None = None
    lookback_days: int = 0


def read_source(spark: SparkSession, source: Source, first: datetime.date, last: datetime.date) -> DataFrame:
    """Rows of `first` to `last` (all rows without a partition column), text columns for CSV.

    The column ``source_file`` names each row's file; ``_corrupt_record`` (CSV, and JSON where there is one) holds
    the text of a row that could not be split into its columns. CSV files may differ in the order of their columns.
    Raises `TableError` when no file is there for these days or one cannot be read, `SchemaError` naming the
    file that lacks a column of the source's schema: it would be taken for a column of nulls.
    """
    from pyspark.sql import functions as F

    files = _files(source, first, last)
    groups: dict[str, list[str]] = {}
    for file in files:
        header = _header(source, file) if source.format == "csv" else ""
        groups.setdefault(header, []).append(file)
    frames = []
    for header, names in groups.items():
        reader = spark.read.option("basePath", str(local_path(source.uri) or source.uri))  # no globs here
        paths = [_spark_path(join(source.uri, name)) for name in names]
        if source.format in {"csv", "json"}:
            reader = reader.option("mode", "PERMISSIVE").option("columnNameOfCorruptRecord", CORRUPT)
        if source.format == "csv":
            # RFC 4180: a quote inside a quoted value is doubled. A reader that skips columns cannot count them.
            reader = reader.option("header", True).option("escape", '"').option("columnPruning", False)
            reader = reader.schema(_text_schema(source, header, names[0]))
        frame = reader.format(source.format).load(paths)
        _check_columns(source, names[0], frame.columns)
        frames.append(frame.withColumn(SOURCE_FILE, F.col("_metadata.file_path")))
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame, allowMissingColumns=True)
    return whole


def missing_days(source: Source, first: datetime.date, last: datetime.date) -> list[datetime.date]:
    """The days of `first` to `last` for which a source that is partitioned by day has no file."""
    if source.partition is None:
        return []
    there = {part for file in _visible(source) for part in file.split("/")}
    days = (first + datetime.timedelta(days=i) for i in range((last - first).days + 1))
    return [day for day in days if f"{source.partition}={day}" not in there]


def _visible(source: Source) -> list[str]:
    return [f for f in list_files(source.uri) if not any(part[0] in "_." for part in f.split("/"))]


def _files(source: Source, first: datetime.date, last: datetime.date) -> Sequence[str]:
    files = _visible(source)
    if source.partition is not None:
        begin = first - datetime.timedelta(days=source.lookback_days)
        days = {f"{source.partition}={begin + datetime.timedelta(days=i)}" for i in range((last - begin).days + 1)}
        files = [file for file in files if days & set(file.split("/"))]
    if not files:
        when = f" for {first} to {last}" if source.partition else ""
        raise TableError(
            f"source {source.name!r}: no files{when} in {source.uri}.",
            fix="Check etl.sources and --date, or wait for the upstream system.",
        )
    return files


def _header(source: Source, file: str) -> str:
    place = locate(join(source.uri, file))
    try:
        with place.filesystem.open_input_stream(place.path) as stream:
            line: bytes = stream.read(_HEADER_BYTES).split(b"\n", 1)[0]
    except (OSError, pa.ArrowException) as error:
        raise TableError(
            f"source {source.name!r}: {file} cannot be read ({error}).", fix="Remove or mend the file."
        ) from error
    if not line.strip():
        raise TableError(f"source {source.name!r}: {file} has no header line.", fix="Remove or mend the file.")
    header = line.decode("utf-8-sig", errors="replace").strip()
    if "\0" in header or "\ufffd" in header[:-1]:  # the last letter may be cut
        raise TableError(
            f"source {source.name!r}: {file} is no CSV: its first line is not UTF-8 text.",
            fix="Remove or mend the file, or correct etl.sources' format.",
        )
    return header


def _text_schema(source: Source, header: str, file: str) -> StructType:
    """Text columns by the header's names, and the one for rows that do not fit it."""
    from pyspark.sql.types import StringType, StructField, StructType

    names = [name or f"_c{at}" for at, name in enumerate(next(csv.reader([header])))]
    twice = [name for name, times in Counter(name.lower() for name in names).items() if times > 1]
    if twice:
        raise TableError(
            f"source {source.name!r}: the header of {file} names column {twice[0]!r} twice.",
            fix="Give each column a name of its own (letter case does not count).",
        )
    return StructType([StructField(name, StringType()) for name in (*names, CORRUPT)])


def _check_columns(source: Source, file: str, have: Sequence[str]) -> None:
    missing = [] if source.schema is None else [f.name for f in source.schema.fields if f.name not in have]
    if source.schema is not None and missing:
        columns = ", ".join(name for name in have if name not in {source.partition, CORRUPT})
        raise SchemaError(
            f"source {source.name!r}: {file} has no column {missing[0]!r}, which {source.schema.source} asks for "
            f"(columns: {columns}).",
            fix="Mend the file's header or the schema.",
        )


def _spark_path(uri: str) -> str:
    local = local_path(uri)
    if local is None:
        return uri
    # Spark reads globs in paths; a folder's name may hold such letters.
    return "".join(f"\\{letter}" if letter in "*?[]{}" else letter for letter in str(local))
