"""Apache Iceberg: a snapshot's files, with columns found by field id and deleted rows taken out.

The package ``pyiceberg`` (no JVM) reads the metadata. A table is named by its folder, by a metadata file, or by a
catalog of pyiceberg's own configuration: ``iceberg://catalog/namespace.table``. A version is a snapshot's id, the
name of a branch or tag, or a time in ISO 8601: then the snapshot that was current at it.
Specification: https://iceberg.apache.org/spec/
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import fs as pafs

from dl_on_spark.errors import TableError
from dl_on_spark.lake import nested, where
from dl_on_spark.lake.formats.content import Content
from dl_on_spark.lake.formats.evolution import with_stored_names
from dl_on_spark.lake.formats.footers import read_footers
from dl_on_spark.lake.formats.iceberg_deletes import deleted_rows, plain
from dl_on_spark.lake.formats.iceberg_filter import row_filter
from dl_on_spark.lake.snapshot import DataFile, encode_rows
from dl_on_spark.lake.storage import Location, locate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEME = "iceberg"
_METADATA = ".metadata.json"
_FIELD_ID = b"PARQUET:field_id"
_NUMBER = re.compile(r"^v?(\d+)")


def address_of(uri: str) -> str:
    """The metadata file of ``iceberg://catalog/namespace.table``, as the catalog names it now."""
    catalog_name, _, table_name = uri.removeprefix(f"{SCHEME}://").partition("/")
    if not table_name:
        raise TableError(f"{uri} names no table.", fix="Write iceberg://catalog/namespace.table.")
    _check_installed(uri)
    from pyiceberg.catalog import load_catalog

    try:
        return str(load_catalog(catalog_name).load_table(table_name).metadata_location)
    except Exception as error:  # each catalog has errors of its own
        raise TableError(
            f"{uri}: the catalog does not give this table ({type(error).__name__}: {error}).",
            fix="Check the name, and the catalog in ~/.pyiceberg.yaml or the PYICEBERG_CATALOG__ variables.",
        ) from error


def recognizes(place: Location) -> bool:
    """Whether this is a metadata file, or a folder with one."""
    return place.path.endswith(_METADATA) or bool(_metadata_files(place))


def resolve(
    place: Location, version: str | None, predicate: str | None = None, spark: SparkSession | None = None
) -> Content:
    """Files, footers and schema of one snapshot of the Iceberg table at `place`.

    pyiceberg prunes by hidden partitions and by the manifests' statistics. Raises `TableError` for a snapshot that
    is not there, for equality deletes and for files that are not Parquet or not below the table's location.
    """
    _check_installed(place.uri)
    table = _open(place)
    root = plain(table.location())
    snapshot = _snapshot(table, version, place.uri)
    scan = table.scan(snapshot_id=None if version is None else snapshot.snapshot_id)  # an old one has its own schema
    of_snapshot = scan.projection()
    schema = _arrow_schema(of_snapshot, place.uri)
    number = None if snapshot is None else str(snapshot.snapshot_id)
    if predicate is not None:
        scan = scan.filter(row_filter(where.parse(predicate, schema, place.uri)))
    tasks = [] if snapshot is None else _tasks(scan, place.uri)
    if not tasks:
        return Content((), (), schema, (), number, root)
    files = _data_files(tasks, root, place.uri)
    ids = {name: of_snapshot.find_field(name).field_id for name in nested.names_of(schema)}
    asked = {name.lower() for name in where.columns_in(predicate)}
    wanted = {field_id for name, field_id in ids.items() if name.lower() in asked}
    footers = read_footers(locate(root), files, _names_ever(table, wanted), spark)
    found: dict[int, dict[str, str]] = {}
    for footer in footers:
        if id(footer.schema) not in found:
            found[id(footer.schema)] = _own_names(footer.schema, ids, table.name_mapping())
    files = with_stored_names(files, footers, [found[id(footer.schema)] for footer in footers])
    return Content(files, tuple(footers), schema, (), number, root)


def _check_installed(uri: str) -> None:
    try:
        import pyiceberg  # noqa: F401
    except ImportError as error:
        raise TableError(
            f"{uri} is an Iceberg table, and the package pyiceberg is not installed.",
            fix="pip install 'dl_on_spark[iceberg]'",
        ) from error


def _open(place: Location) -> Any:
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.table import StaticTable

    address = place.uri if place.path.endswith(_METADATA) else f"{place.uri.rstrip('/')}/{_newest_metadata(place)}"
    try:
        return StaticTable.from_metadata(plain(address), _properties())
    except (OSError, ValueError, ValidationError) as error:
        raise TableError(
            f"{address} is no Iceberg metadata that can be read: {' '.join(str(error).split())[:300]}.",
            fix="Give the table's folder, a whole metadata file, or iceberg://catalog/namespace.table.",
        ) from error


def _properties() -> dict[str, str]:
    """Credentials come from the environment, as pyarrow.fs takes them; so does another endpoint of S3."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    return {"s3.endpoint": endpoint} if endpoint else {}


def _metadata_files(place: Location) -> list[str]:
    selector = pafs.FileSelector(f"{place.path}/metadata", allow_not_found=True)
    try:
        found = place.filesystem.get_file_info(selector)
    except OSError:  # a file, not a folder
        return []
    return [info.base_name for info in found if info.base_name.endswith(_METADATA)]


def _newest_metadata(place: Location) -> str:
    """By number: a folder does not say which metadata is current; a catalog does."""
    numbered = [(int(found[1]), name) for name in _metadata_files(place) if (found := _NUMBER.match(name))]
    newest = [name for number, name in numbered if number == max(numbered)[0]]
    if len(newest) != 1:
        raise TableError(
            f"{place.uri}: which of {sorted(newest)[:4]} is the table's newest metadata cannot be told.",
            fix="Give the metadata file, or iceberg://catalog/namespace.table.",
        )
    return f"metadata/{newest[0]}"


def _snapshot(table: Any, version: str | None, uri: str) -> Any:
    if version is None:
        return table.current_snapshot()
    found = table.snapshot_by_id(int(version)) if version.isdigit() else table.snapshot_by_name(version)
    if found is None and not version.isdigit():
        try:
            moment = datetime.datetime.fromisoformat(version)
        except ValueError:
            moment = None
        if moment is not None:
            moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
            found = table.snapshot_as_of_timestamp(int(moment.timestamp() * 1000))
    if found is None:
        known = ", ".join(str(snapshot.snapshot_id) for snapshot in list(table.snapshots())[-3:]) or "none"
        raise TableError(
            f"{uri} has no snapshot {version!r} (the last ones: {known}).",
            fix="Name a snapshot's id, a branch, a tag, or a time such as 2024-06-30T02:00:00Z.",
        )
    return found


def _tasks(scan: Any, uri: str) -> list[Any]:
    from pyiceberg.manifest import DataFileContent, FileFormat

    try:
        tasks = list(scan.plan_files())
    except (ValueError, NotImplementedError) as error:
        if "quality delete" not in str(error):
            raise
        raise _equality_deletes(uri) from error
    except OSError as error:
        raise TableError(
            f"{uri}: a manifest of the snapshot cannot be read ({error}).",
            fix="Read the newest snapshot: an old one loses its files when it expires.",
        ) from error
    for task in tasks:
        if any(file.content == DataFileContent.EQUALITY_DELETES for file in task.delete_files):
            raise _equality_deletes(uri)
        if task.file.file_format != FileFormat.PARQUET:
            raise TableError(
                f"{uri}: {task.file.file_path} is {task.file.file_format.name}, not Parquet.",
                fix="Rewrite the table's files as Parquet (CALL system.rewrite_data_files).",
            )
    return tasks


def _equality_deletes(uri: str) -> TableError:
    return TableError(
        f"{uri} has equality deletes, which are not applied here.",
        fix="Compact the table (CALL system.rewrite_data_files), which writes its rows without them.",
    )


def _data_files(tasks: Sequence[Any], root: str, uri: str) -> tuple[DataFile, ...]:
    deleted = deleted_rows({file.file_path: file for task in tasks for file in task.delete_files}.values())
    files = []
    for task in tasks:
        path = plain(task.file.file_path)
        if not path.startswith(f"{root}/"):
            raise TableError(
                f"{uri}: the table's file {path} lies outside of its location {root}.",
                fix="Rewrite the table's files (CALL system.rewrite_data_files).",
            )
        positions = [deleted[file.file_path][task.file.file_path] for file in task.delete_files]
        rows = np.concatenate([np.zeros(0, np.int64), *(p for p in positions if p is not None)])
        files.append(DataFile(path[len(root) + 1 :], task.file.file_size_in_bytes, deleted=encode_rows(rows)))
    return tuple(sorted(files, key=lambda file: file.path))


def _names_ever(table: Any, ids: set[int]) -> set[str]:
    """Names that these fields have had in any of the table's schemas: the files' statistics are under one of them."""
    found = set()
    for schema in table.schemas().values():
        for field_id in ids:
            name = schema.find_column_name(field_id)
            if name is not None:
                found.add(name)
    return found


def _own_names(schema: pa.Schema, ids: Mapping[str, int], mapping: Any) -> dict[str, str]:
    """A file's own name of each of the table's columns, by field id; by the name mapping where it has no ids."""
    own = dict(_ids(list(schema), ""))
    if not own and mapping is not None:
        own = {}
        for name in nested.names_of(schema):
            try:
                own[mapping.find(name).field_id] = name
            except ValueError:  # a column that the table does not know
                continue
    elif not own:
        return {name: name for name in ids}
    return {name: own.get(field_id, "") for name, field_id in ids.items()}


def _ids(fields: Sequence[pa.Field], above: str) -> Iterator[tuple[int, str]]:
    for field in fields:
        name = f"{above}{field.name}"
        if field.metadata and _FIELD_ID in field.metadata:
            yield int(field.metadata[_FIELD_ID]), name
        if pa.types.is_struct(field.type):
            yield from _ids(list(field.type), f"{name}.")


def _arrow_schema(schema: Any, uri: str) -> pa.Schema:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    try:
        found = schema_to_pyarrow(schema, include_field_ids=False)
    except (ValueError, NotImplementedError) as error:
        raise TableError(
            f"{uri}: its schema has a type that Arrow has not ({error}).", fix="Drop that column."
        ) from error
    return pa.schema([field.with_type(_as_stored(field.type)) for field in found])


def _as_stored(kind: pa.DataType) -> pa.DataType:
    """pyiceberg gives texts and lists 64-bit offsets; files are read with 32-bit ones."""
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_as_stored(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_stored(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_as_stored(kind.key_type), _as_stored(kind.item_type))
    return kind
