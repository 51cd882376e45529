"""Plain Parquet: a folder of files, hive-partitioned or not, or one file."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from dl_on_spark.errors import TableError
from dl_on_spark.lake import where
from dl_on_spark.lake.formats.content import Content
from dl_on_spark.lake.snapshot import DataFile, PartitionValue
from dl_on_spark.lake.staging import set_aside
from dl_on_spark.lake.storage import Location

_TAIL_BYTES = 64 * 1024
_THREADS = 16
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


def resolve(place: Location, version: str | None, predicate: str | None = None) -> Content:
    """Files, footers and schema of the table at `place`.

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
    partitions, partition_types = _typed_partitions(place, [path for path, _ in paths], raw_partitions)
    files = tuple(DataFile(path, size, partition) for (path, size), partition in zip(paths, partitions, strict=True))
    if predicate is not None:
        partition_schema = pa.schema(list(partition_types.items()))
        wanted = where.partition_test(predicate, partition_schema, place.uri)
        # One file at least: its schema tells a filter that matches nothing from one that is wrong.
        files = tuple(file for file in files if wanted(file.partition)) or files[:1]
    with ThreadPoolExecutor(_THREADS) as pool:
        read = list(pool.map(lambda file: _read_footer(place, file), files))
    footers = tuple(footer for footer, _ in read)
    schema = _unified_schema(place, files, footers)
    clash = set(schema.names) & set(partition_types)
    if clash:
        raise TableError(
            f"{place.uri}: column {sorted(clash)[0]!r} is in the files and in the folders' names.",
            fix="Write the files without the partition column.",
        )
    for name, kind in partition_types.items():
        schema = schema.append(pa.field(name, kind))
    return Content(files, footers, tuple(digest for _, digest in read), schema, tuple(partition_types))


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
    place: Location, paths: Sequence[str], raw: Sequence[Mapping[str, str | None]]
) -> tuple[list[dict[str, PartitionValue]], dict[str, pa.DataType]]:
    """Values typed by all values of their column: int, date, else string."""
    names = list(raw[0]) if raw else []
    for path, values in zip(paths, raw, strict=True):
        if list(values) != names:
            raise TableError(
                f"{place.uri}: {paths[0]} has the partition columns {names}, {path} has {list(values)}.",
                fix="Give all files of a table the same partition folders.",
            )
    types = {name: _partition_type({values[name] for values in raw} - {None}) for name in names}
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


def _read_footer(place: Location, file: DataFile) -> tuple[Any, str]:
    """The parsed footer and a digest of its bytes, which describe offsets, sizes and statistics."""
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
        footer = tail[-length - 8 :]
        return pq.read_metadata(pa.BufferReader(footer)), hashlib.sha256(footer).hexdigest()
    except (OSError, pa.ArrowException) as error:
        raise TableError(f"{name} cannot be read: {error}.", fix="Check the file and its permissions.") from error


def _unified_schema(place: Location, files: Sequence[DataFile], footers: Sequence[Any]) -> pa.Schema:
    """One schema for all files, where no value can change; else an error that names two files."""
    unified: pa.Schema | None = None
    origin: dict[str, str] = {}
    seen: list[pa.Schema] = []
    for file, footer in zip(files, footers, strict=True):
        try:
            schema = _arrow_schema(footer)
        except (pa.ArrowException, ValueError) as error:
            raise TableError(
                f"{place.uri}: {file.path}: its schema is not one Arrow knows: {error}.",
                fix="Write the file again with Spark or pyarrow.",
            ) from error
        if any(schema.equals(known) for known in seen):
            continue
        seen.append(schema)
        if unified is None:
            unified, origin = schema, dict.fromkeys(schema.names, file.path)
            continue
        unified = _merge(place, unified, origin, schema, file.path)
    assert unified is not None  # there is at least one file
    return unified


def _arrow_schema(footer: Any) -> pa.Schema:
    """The Arrow schema as `RowGroupDecoder` reads it: INT96 timestamps, Spark's default, as microseconds.

    Arrow's own choice for them, nanoseconds, wraps years before 1677 and after 2262.
    """
    schema = footer.schema.to_arrow_schema().remove_metadata()
    parts = [footer.schema.column(i) for i in range(footer.num_columns)]
    for column in parts:
        if column.physical_type == "INT96":
            at = schema.get_field_index(column.path.partition(".")[0])
            field = schema.field(at)
            schema = schema.set(at, field.with_type(_in_microseconds(field.type)))
    return schema


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    if pa.types.is_map(kind):
        key = kind.key_field.with_type(_in_microseconds(kind.key_type))
        return pa.map_(key, kind.item_field.with_type(_in_microseconds(kind.item_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    return kind


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
