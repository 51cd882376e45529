"""A table pinned: its files, row groups and row counts as they were when the run began."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.lake import nested

PartitionValue = int | str | datetime.date | None
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DataFile:
    """One Parquet file: its path below the table's folder ('' when the table is that file), its bytes
    and the values of its partition columns."""

    path: str
    size: int
    partition: Mapping[str, PartitionValue] = field(default_factory=dict)


@dataclass(frozen=True)
class RowGroups:
    """All row groups of a snapshot as int64 arrays of shape (n,), in file order.

    ``file``: index into the snapshot's files. ``index``: position in its file. ``rows``: rows that
    pass the filter. ``stored_rows``: rows in the footer. ``bytes``: uncompressed size.
    """

    file: Counts
    index: Counts
    rows: Counts
    stored_rows: Counts
    bytes: Counts

    def __len__(self) -> int:
        return len(self.rows)


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
            DataFile(f["path"], f["size"], {k: _decode(v) for k, v in f["partition"].items()}) for f in data["files"]
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


_COLUMNS = ("file", "index", "rows", "stored_rows", "bytes")


def _encode(value: PartitionValue) -> Any:
    return {"date": value.isoformat()} if isinstance(value, datetime.date) else value


def _decode(value: Any) -> PartitionValue:
    if isinstance(value, dict):
        return datetime.date.fromisoformat(value["date"])
    decoded: PartitionValue = value
    return decoded
