"""Plain Parquet: a folder of files, hive-partitioned or not, or one file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs as pafs

from dl_on_spark.errors import TableError
from dl_on_spark.lake import where
from dl_on_spark.lake.formats.content import Content
from dl_on_spark.lake.formats.footers import Footer, read_footers
from dl_on_spark.lake.snapshot import DataFile, PartitionValue
from dl_on_spark.lake.staging import set_aside
from dl_on_spark.lake.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Orders in which a type takes every value of those before it.
_WIDENING = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    (pa.float16(), pa.float32(), pa.float64()),
    (pa.string(), pa.large_string()),
    (pa.binary(), pa.large_binary()),
)


def recognizes(place: Location) -> bool:
    """Whether something is there; any folder may be a Parquet table."""
    return bool(place.filesystem.get_file_info(place.path).type != pafs.FileType.NotFound)


def resolve(
    place: Location,
    version: str | None,
    predicate: str | None = None,
    spark: SparkSession | None = None,
    *,
    text_partitions: Collection[str] = (),
) -> Content:
    """Files, footers and schema of the table at `place`.

    ``text_partitions``: partition columns that are text, whatever their values look like.

    Only files of partitions in which `predicate` may be true are opened, side by side. Hidden names
    (first letter ``_`` or ``.``) are not part of the table. Raises `TableError` naming the file that
    cannot be read, or both files whose schemas do not fit each other.
    """
    if version is not None:
        raise TableError(
            f"{place.uri}: plain Parquet has no versions (asked for {version!r}).", fix="Leave version unset."
        )
    paths = _data_files(place)
    raw_partitions = [_hive_values(path) for path, _ in paths]
    partitions, types = _typed_partitions(place, [path for path, _ in paths], raw_partitions, text_partitions)
    files = tuple(DataFile(path, size, partition) for (path, size), partition in zip(paths, partitions, strict=True))
    if predicate is not None:
        partition_schema = pa.schema(list(types.items()))
        wanted = where.partition_test(predicate, partition_schema, place.uri)
        # One file at least: its schema tells a filter that matches nothing from one that is wrong.
        files = tuple(file for file in files if wanted(file.partition)) or files[:1]
    footers = tuple(read_footers(place, files, where.columns_in(predicate), spark))
    schema = unified_schema(place, files, footers)
    clash = set(schema.names) & set(types)
    if clash:
        raise TableError(
            f"{place.uri}: column {sorted(clash)[0]!r} is in the files and in the folders' names.",
            fix="Write the files without the partition column.",
        )
    for name, kind in types.items():
        schema = schema.append(pa.field(name, kind))
    return Content(files, footers, schema, tuple(types))


def _data_files(place: Location) -> list[tuple[str, int]]:
    """(path below the table, bytes) of each data file, sorted; one entry '' for a single file."""
    info = place.filesystem.get_file_info(place.path)
    if info.type == pafs.FileType.File:
        return [("", info.size)]
    prefix = len(place.path.rstrip("/")) + 1
    try:
        found = place.filesystem.get_file_info(pafs.FileSelector(place.path, recursive=True))
    except OSError as error:
        raise TableError(f"{place.uri} cannot be listed: {error}.", fix="Check its permissions.") from error
    files = {entry.path[prefix:]: entry.size for entry in found if entry.type == pafs.FileType.File}
    shown = {path for path in files if not any(part[0] in "_." for part in path.split("/"))}
    folders = {entry.path[prefix:] for entry in found if entry.type == pafs.FileType.Directory}
    shown |= set_aside(files, folders)
    visible = sorted((path, files[path]) for path in shown)
    if not visible:
        raise TableError(f"{place.uri} holds no data files.", fix="Check the path, or run the ETL first.")
    return visible


def _hive_values(path: str) -> dict[str, str | None]:
    """Partition column → text of a path like ``date=2013-06-01/hour=5/part-0.parquet``."""
    values: dict[str, str | None] = {}
    for part in path.split("/")[:-1]:
        name, separator, text = part.partition("=")
        if separator and name:
            value = unquote(text)
            values[unquote(name)] = None if value == _HIVE_NULL else value
    return values


def _typed_partitions(
    place: Location,
    paths: Sequence[str],
    raw: Sequence[Mapping[str, str | None]],
    text: Collection[str],
) -> tuple[list[dict[str, PartitionValue]], dict[str, pa.DataType]]:
    """Values typed by all values of their column: int, date, else string. ``text``: columns that are string."""
    names = list(raw[0]) if raw else []
    for path, values in zip(paths, raw, strict=True):
        if list(values) != names:
            raise TableError(
                f"{place.uri}: {paths[0]} has the partition columns {names}, {path} has {list(values)}.",
                fix="Give all files of a table the same partition folders.",
            )
    values_of = {name: {values[name] for values in raw} - {None} for name in names if name not in text}
    types = {name: _partition_type(values_of[name]) if name in values_of else pa.string() for name in names}
    typed = [{name: _typed(text, types[name]) for name, text in values.items()} for values in raw]
    return typed, types


def _partition_type(texts: Iterable[str | None]) -> pa.DataType:
    known = [text for text in texts if text is not None]
    if known and all(_INTEGER.fullmatch(text) for text in known):
        small = all(-(2**31) <= int(text) < 2**31 for text in known)
        return pa.int32() if small else pa.int64()
    if known and all(_is_date(text) for text in known):
        return pa.date32()
    return pa.string()


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _typed(text: str | None, kind: pa.DataType) -> PartitionValue:
    if text is None or pa.types.is_string(kind):
        return text
    return int(text) if pa.types.is_integer(kind) else datetime.date.fromisoformat(text)


def unified_schema(place: Location, files: Sequence[DataFile], footers: Sequence[Footer]) -> pa.Schema:
    """One schema for all files, where no value can change; else an error that names two files."""
    unified: pa.Schema | None = None
    origin: dict[str, str] = {}
    seen: set[int] = set()
    for file, footer in zip(files, footers, strict=True):
        if id(footer.schema) in seen:  # equal schemas are one object
            continue
        seen.add(id(footer.schema))
        if unified is None:
            unified, origin = footer.schema, dict.fromkeys(footer.schema.names, file.path)
            continue
        unified = _merge(place, unified, origin, footer.schema, file.path)
    assert unified is not None  # there is at least one file
    return unified


def _merge(place: Location, known: pa.Schema, origin: dict[str, str], new: pa.Schema, path: str) -> pa.Schema:
    first = next(iter(origin.values()), "")
    for names, others, file, other in (
        (known.names, new.names, first, path),
        (new.names, known.names, path, first),
    ):
        missing = [name for name in names if name not in others]
        if missing:
            raise TableError(
                f"{place.uri}: column {missing[0]!r} is in {file} but not in {other}.",
                fix="Write the older files again with the column, or leave them out with where().",
            )
    fields = []
    for field in known:
        other = new.field(field.name)
        kind = _wider(field.type, other.type)
        if kind is None:
            raise TableError(
                f"{place.uri}: column {field.name!r} is {field.type} in {origin[field.name]} and "
                f"{other.type} in {path}.",
                fix="Write one of the files again with the other's type.",
            )
        if kind != field.type:
            origin[field.name] = path
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def _wider(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds every value of both; None where there is none."""
    if a == b:
        return a
    for order in _WIDENING:
        if a in order and b in order:
            return order[max(order.index(a), order.index(b))]
    return None
