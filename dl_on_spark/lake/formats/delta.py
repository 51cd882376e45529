"""Delta Lake: the log says which files a version has; its schema, partition values and deletion vectors apply.

The package ``deltalake`` (delta-rs, no JVM) reads the log. A version is a number, or a time in ISO 8601: then the
last version that was committed until then. Protocol: https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import numpy as np
import pyarrow as pa

from dl_on_spark.errors import TableError
from dl_on_spark.lake import nested, where
from dl_on_spark.lake.formats.content import Content
from dl_on_spark.lake.formats.evolution import with_stored_names
from dl_on_spark.lake.formats.footers import read_footers
from dl_on_spark.lake.predicates import Range
from dl_on_spark.lake.snapshot import DataFile, encode_rows
from dl_on_spark.lake.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOG = "_delta_log"
_PHYSICAL_NAME = "delta.columnMapping.physicalName"


def recognizes(place: Location) -> bool:
    """Whether a folder has a Delta log."""
    from pyarrow import fs as pafs

    return bool(place.filesystem.get_file_info(f"{place.path}/{_LOG}").type == pafs.FileType.Directory)


def resolve(
    place: Location, version: str | None, predicate: str | None = None, spark: SparkSession | None = None
) -> Content:
    """Files, footers and schema of one version of the Delta table at `place`.

    Files are left out by their partition values and by the log's statistics before they are opened. Raises
    `TableError` for a version that is not there, a file that was vacuumed, and a feature that cannot be read.
    """
    table = _open(place, version)
    number = table.version()
    described = json.loads(table.schema().to_json())["fields"]
    partitions = list(table.metadata().partition_columns)
    everything = pa.schema(table.schema().to_arrow())
    schema = pa.schema(
        [field for field in everything if field.name not in partitions] + [everything.field(p) for p in partitions]
    )
    names = {logical: own for logical, own in _physical_names(described) if logical.split(".")[0] not in partitions}
    files = tuple(_files(place, table, schema, partitions, predicate))
    if not files:
        return Content((), (), schema, tuple(partitions), str(number))
    asked = {name.lower() for name in where.columns_in(predicate)}
    footers = read_footers(place, files, {own for name, own in names.items() if name.lower() in asked}, spark)
    files = with_stored_names(files, footers, [names] * len(files))
    return Content(files, tuple(footers), schema, tuple(partitions), str(number))


def _open(place: Location, version: str | None) -> Any:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise TableError(
            f"{place.uri} is a Delta table, and the package deltalake is not installed.",
            fix="pip install 'dl_on_spark[delta]'",
        ) from error
    try:
        table = DeltaTable(place.uri, storage_options=_storage_options(place))
        if version is not None:
            moment = None if version.isdigit() else _time(place, version)
            if moment is not None and min(c["timestamp"] for c in table.history()) > moment.timestamp() * 1000:
                raise ValueError("the log does not reach back so far")
            table.load_as_version(int(version) if moment is None else moment)
    except (DeltaError, ValueError, OSError) as error:
        what = "cannot be opened" if version is None else f"has no version {version!r} that can be opened"
        raise TableError(
            f"{place.uri} {what}: {' '.join(str(error).split())}.",
            fix="Name a version that the log still has, or a reader feature that deltalake knows.",
        ) from error
    return table


def _time(place: Location, version: str) -> datetime.datetime:
    try:
        moment = datetime.datetime.fromisoformat(version)
    except ValueError as error:
        raise TableError(
            f"{place.uri}: version {version!r} is no number and no time.", fix="Write 12 or 2024-06-30T02:00:00Z."
        ) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)


def _storage_options(place: Location) -> dict[str, str] | None:
    """Credentials come from the environment; an endpoint without TLS has to be allowed in words."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {"allow_http": "true"} if plain and place.uri.startswith("s3://") else None


def _physical_names(fields: list[dict[str, Any]], logical: str = "", own: str = "") -> Iterator[tuple[str, str]]:
    """(name in the table, name in the files) of all columns, dotted inside structs: column mapping renames both."""
    for field in fields:
        name = f"{logical}{field['name']}"
        stored = f"{own}{field.get('metadata', {}).get(_PHYSICAL_NAME, field['name'])}"
        yield name, stored
        if isinstance(field["type"], dict) and field["type"]["type"] == "struct":
            yield from _physical_names(field["type"]["fields"], f"{name}.", f"{stored}.")


def _files(
    place: Location, table: Any, schema: pa.Schema, partitions: list[str], predicate: str | None
) -> Iterator[DataFile]:
    node = None if predicate is None else where.parse(predicate, schema, place.uri)
    deleted = _deleted(table)
    actions = pa.table(table.get_add_actions(flatten=False))
    statistics = {name: actions.column(name) for name in ("min", "max", "null_count") if name in actions.column_names}
    wanted = [] if node is None else [name for name in node.columns() if _exact(schema, name)]
    for row, action in enumerate(actions.select(_present(actions)).to_pylist()):
        path = unquote(action["path"])
        if urlparse(path).scheme or path.startswith("/"):
            raise TableError(
                f"{place.uri}: the table's file {path} lies outside of its folder (a shallow clone).",
                fix="Give the table that it was cloned from, or copy it: CREATE TABLE ... DEEP CLONE.",
            )
        values: Mapping[str, Any] = action.get("partition") or {}
        partition = {name: values.get(name) for name in partitions}
        if node is not None:
            known = {name: Range.constant(value) for name, value in partition.items()}
            for name in set(wanted) - set(partitions):
                found = _range(statistics, row, name)
                if found is not None:
                    known[name] = found
            if True not in node.outcomes(known):
                continue
        yield DataFile(path, action["size_bytes"], partition, deleted=deleted.get(path, ""))


def _present(actions: pa.Table) -> list[str]:
    return [name for name in ("path", "size_bytes", "partition") if name in actions.column_names]


def _exact(schema: pa.Schema, name: str) -> bool:
    """Whether the log's least and greatest values of a column are exact: texts are cut there, times rounded."""
    field = nested.field_of(schema, name)
    return field is not None and (pa.types.is_integer(field.type) or pa.types.is_date(field.type))


def _range(statistics: Mapping[str, pa.ChunkedArray], row: int, name: str) -> Range | None:
    if "." in name or set(statistics) != {"min", "max", "null_count"}:
        return None
    low, high, nulls = ((column[row].as_py() or {}).get(name) for column in statistics.values())
    return None if low is None or high is None or nulls is None else Range(low, high, nulls != 0)


def _deleted(table: Any) -> dict[str, str]:
    """Deleted rows by path below the table, of the files that have a deletion vector."""
    vectors = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all()
    root = unquote(table.table_uri).rstrip("/")
    found = {}
    for uri, kept in zip(vectors.column("filepath").to_pylist(), vectors.column("selection_vector"), strict=True):
        rows = np.flatnonzero(~np.asarray(kept.values.to_numpy(zero_copy_only=False), bool))
        found[unquote(uri).removeprefix(root).lstrip("/")] = encode_rows(rows)
    return found
