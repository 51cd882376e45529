"""Delete files of Iceberg tables written by hand as the specification says: pyiceberg reads them, but writes none.

https://iceberg.apache.org/spec/#row-level-deletes
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import Table
from pyiceberg.typedef import Record


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def delete_positions(table: Table, rows: Sequence[tuple[str, int]]) -> Path:
    """Delete (data file, position) pairs of an unpartitioned table; the metadata file that has them."""
    file = Path(_local(table)) / "data" / "deletes.parquet"
    paths, positions = zip(*sorted(rows), strict=True)
    pq.write_table(pa.table({"file_path": list(paths), "pos": pa.array(positions, pa.int64())}), file)
    return _with_deletes(table, file, len(rows), DataFileContent.POSITION_DELETES, None)


def delete_equal(table: Table, column: str, values: Sequence[Any]) -> Path:
    """Delete the rows that have one of these values; the metadata file that says so."""
    file = Path(_local(table)) / "data" / "equal.parquet"
    pq.write_table(pa.table({column: list(values)}), file)
    number = table.schema().find_field(column).field_id
    return _with_deletes(table, file, len(values), DataFileContent.EQUALITY_DELETES, [number])


def _with_deletes(table: Table, file: Path, rows: int, content: DataFileContent, fields: list[int] | None) -> Path:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    number, sequence = snapshot.snapshot_id + 1, table.metadata.last_sequence_number + 1
    folder = Path(_local(table)) / "metadata"
    output = table.io.new_output(str(folder / "deletes.avro"))
    with _DeletesWriter(table.spec(), table.schema(), output, number, "null") as writer:
        deletes = DataFile.from_args(
            content=content,
            file_path=str(file),
            file_format=FileFormat.PARQUET,
            partition=Record(),
            record_count=rows,
            file_size_in_bytes=file.stat().st_size,
            equality_ids=fields,
        )
        entry = ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=number, data_file=deletes)
        writer.add_entry(entry)
    manifests = [*snapshot.manifests(table.io), writer.to_manifest_file()]
    listed = table.io.new_output(str(folder / "with-deletes.avro"))
    with write_manifest_list(2, listed, number, snapshot.snapshot_id, sequence, "null") as list_writer:
        list_writer.add_manifests(manifests)
    metadata = json.loads(Path(str(table.metadata_location).removeprefix("file://")).read_text())
    metadata["snapshots"].append(
        {
            "snapshot-id": number,
            "parent-snapshot-id": snapshot.snapshot_id,
            "sequence-number": sequence,
            "timestamp-ms": metadata["last-updated-ms"] + 1,
            "manifest-list": str(folder / "with-deletes.avro"),
            "summary": {"operation": "delete"},
            "schema-id": metadata["current-schema-id"],
        }
    )
    metadata |= {"current-snapshot-id": number, "last-sequence-number": sequence}
    metadata["refs"] = {"main": {"snapshot-id": number, "type": "branch"}}
    written = folder / "00099-deletes.metadata.json"
    written.write_text(json.dumps(metadata))
    return written


def _local(table: Table) -> str:
    return table.location().removeprefix("file://")
