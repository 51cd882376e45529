"""Delta tables written by hand as the protocol says, for what deltalake itself does not write.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def field(name: str, kind: Any, physical: str | None = None, number: int = 0) -> dict[str, Any]:
    """One field of a schemaString, under another name in the files if asked."""
    mapping = {"delta.columnMapping.physicalName": physical, "delta.columnMapping.id": number} if physical else {}
    return {"name": name, "type": kind, "nullable": True, "metadata": mapping}


def add(
    root: Path, path: str, rows: pa.Table, partition: Mapping[str, str | None], vector: Any = None
) -> dict[str, Any]:
    """Write a data file and return its add action."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, target, row_group_size=4)
    action = {
        "path": path,
        "partitionValues": dict(partition),
        "size": target.stat().st_size,
        "modificationTime": 1_700_000_000_000,
        "dataChange": True,
        "stats": json.dumps({"numRecords": rows.num_rows}),
    }
    return {"add": action if vector is None else {**action, "deletionVector": vector}}


def commit(root: Path, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
    """Write one version's file of the log."""
    log = root / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def table_actions(fields: Sequence[Mapping[str, Any]], partitions: Sequence[str], features: Sequence[str]) -> list[Any]:
    """The protocol and metaData actions of a new table with reader features."""
    configuration = {"delta.columnMapping.mode": "name"} if "columnMapping" in features else {}
    return [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": list(features),
                "writerFeatures": list(features),
            }
        },
        {
            "metaData": {
                "id": str(uuid.uuid4()),
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": list(fields)}),
                "partitionColumns": list(partitions),
                "configuration": configuration,
                "createdTime": 1_700_000_000_000,
            }
        },
    ]


def inline_vector(rows: Sequence[int]) -> dict[str, Any]:
    """A deletion vector that lies in the log itself."""
    data = _bitmap(rows)
    return {"storageType": "i", "pathOrInlineDv": _z85(data), "sizeInBytes": len(data), "cardinality": len(rows)}


def vector_file(root: Path, rows: Sequence[int]) -> dict[str, Any]:
    """A deletion vector in a file beside the data."""
    name, data = uuid.uuid4(), _bitmap(rows)
    content = b"\x01" + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    (root / f"deletion_vector_{name}.bin").write_bytes(content)
    return {
        "storageType": "u",
        "pathOrInlineDv": _z85(name.bytes),
        "offset": 1,
        "sizeInBytes": len(data),
        "cardinality": len(rows),
    }


def _bitmap(rows: Sequence[int]) -> bytes:
    """Rows below 65,536 as a 64-bit Roaring bitmap array with one array container, padded for Z85."""
    values = sorted(rows)
    header = struct.pack("<iqI", 1681511377, 1, 0)
    body = struct.pack("<IIHHI", 12346, 1, 0, len(values) - 1, 16) + struct.pack(f"<{len(values)}H", *values)
    data = header + body
    return data + b"\0" * (-len(data) % 4)


def _z85(data: bytes) -> str:
    words = struct.unpack(f">{len(data) // 4}I", data)
    return "".join(_Z85[word // 85**power % 85] for word in words for power in (4, 3, 2, 1, 0))
