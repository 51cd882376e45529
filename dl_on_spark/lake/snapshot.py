"""A table pinned: its files, row groups and row counts as they were when the run began."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.lake import nested

PartitionValue = bool | int | float | str | Decimal | datetime.date | datetime.datetime | None
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DataFile:
    """One Parquet file: its path below the table's folder ('' when the table is that file), its bytes
    and the values of its partition columns.

    ``stored_as``: the file's own name of a column (dotted inside structs) where it is another than the table's; ''
    where the file lacks the column and all its rows are null. ``deleted``: rows of the file that the table has no
    more, as `encode_rows` packs them.
    """

    path: str
    size: int
    partition: Mapping[str, PartitionValue] = field(default_factory=dict)
    stored_as: Mapping[str, str] = field(default_factory=dict)
    deleted: str = ""

    @cached_property
    def deleted_rows(self) -> Counts:
        """Positions in the file of the rows that the table has no more, sorted."""
        steps: Any = np.frombuffer(zlib.decompress(base64.b64decode(self.deleted)), "<i8") if self.deleted else []
        return np.cumsum(np.asarray(steps, np.int64))


def encode_rows(positions: Counts) -> str:
    """Row positions in a file as text: the steps between them, compressed."""
    if not len(positions):
        return ""
    return base64.b64encode(zlib.compress(np.diff(np.unique(positions), prepend=0).astype("<i8").tobytes())).decode()


@dataclass(frozen=True)
class RowGroups:
    """All row groups of a snapshot as int64 arrays of shape (n,), in file order.

    ``file``: index into the snapshot's files. ``index``: position in its file. ``rows``: rows that
    are not deleted and pass the filter. ``stored_rows``: rows in the footer. ``first_row``: of the file's rows.
    ``bytes``: uncompressed size.
    """

    file: Counts
    index: Counts
    rows: Counts
    stored_rows: Counts
    first_row: Counts
    bytes: Counts

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, chosen: npt.NDArray[Any]) -> RowGroups:
        """The row groups of an index or a mask."""
        return RowGroups(*(getattr(self, name)[chosen] for name in _COLUMNS))


@dataclass(frozen=True)
class Snapshot:
    """Files, row groups and rows of a table at one moment, under one filter and selection.

    ``table_schema`` has all columns, partition columns last; ``columns`` the selected names (None: all).
    ``digest`` covers the content that the footers describe; `fingerprint` adds filter and columns.
    """

    uri: str
    format: str
    version: str | None
    files: tuple[DataFile, ...]
    row_groups: RowGroups
    table_schema: pa.Schema
    columns: tuple[str, ...] | None
    where: str | None
    digest: str

    @cached_property
    def schema(self) -> pa.Schema:
        """The selected columns, in the order of the selection."""
        if self.columns is None:
            return self.table_schema
        return pa.schema([nested.field_of(self.table_schema, name) for name in self.columns])

    @cached_property
    def rows(self) -> int:
        """Rows that pass the filter."""
        return int(self.row_groups.rows.sum())

    @cached_property
    def bytes(self) -> int:
        """Uncompressed bytes of the row groups."""
        return int(self.row_groups.bytes.sum())

    @property
    def num_row_groups(self) -> int:
        """Row groups that may hold rows which pass the filter."""
        return len(self.row_groups)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that change with data, filter or columns, and with nothing else."""
        parts = [self.digest, self.where or "", self.schema.serialize().to_pybytes().hex()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """All of the snapshot as JSON text."""
        groups = self.row_groups
        return json.dumps(
            {
                "uri": self.uri,
                "format": self.format,
                "version": self.version,
                "files": [
                    {
                        "path": f.path,
                        "size": f.size,
                        "partition": {k: _encode(v) for k, v in f.partition.items()},
                        **({"stored_as": dict(f.stored_as)} if f.stored_as else {}),
                        **({"deleted": f.deleted} if f.deleted else {}),
                    }
                    for f in self.files
                ],
                "row_groups": {name: getattr(groups, name).tolist() for name in _COLUMNS},
                "schema": base64.b64encode(self.table_schema.serialize().to_pybytes()).decode(),
                "columns": self.columns,
                "where": self.where,
                "digest": self.digest,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """The snapshot that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        files = tuple(
            DataFile(
                f["path"],
                f["size"],
                {k: _decode(v) for k, v in f["partition"].items()},
                f.get("stored_as", {}),
                f.get("deleted", ""),
            )
            for f in data["files"]
        )
        groups = RowGroups(*(np.asarray(data["row_groups"][name], dtype=np.int64) for name in _COLUMNS))
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(data["schema"])))
        columns = None if data["columns"] is None else tuple(data["columns"])
        return cls(
            uri=data["uri"],
            format=data["format"],
            version=data["version"],
            files=files,
            row_groups=groups,
            table_schema=schema,
            columns=columns,
            where=data["where"],
            digest=data["digest"],
        )


_COLUMNS = ("file", "index", "rows", "stored_rows", "first_row", "bytes")


def _encode(value: PartitionValue) -> Any:
    if isinstance(value, datetime.datetime):
        return {"timestamp": value.isoformat()}
    if isinstance(value, datetime.date):
        return {"date": value.isoformat()}
    return {"decimal": str(value)} if isinstance(value, Decimal) else value


def _decode(value: Any) -> PartitionValue:
    if isinstance(value, dict):
        ((kind, text),) = value.items()
        read = {"date": datetime.date, "timestamp": datetime.datetime}.get(kind)
        return Decimal(text) if read is None else read.fromisoformat(text)
    decoded: PartitionValue = value
    return decoded
