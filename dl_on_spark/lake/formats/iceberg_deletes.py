"""Rows that Iceberg's delete files take out of data files: position deletes and deletion vectors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow.parquet as pq

from dl_on_spark.lake.storage import local_path, locate


def deleted_rows(delete_files: Iterable[Any]) -> dict[str, Mapping[str, Any]]:
    """Deleted positions by delete file and data file (None: the delete file has none for it)."""
    found: dict[str, Mapping[str, Any]] = {}
    for file in delete_files:
        by_path: dict[str, Any] = defaultdict(lambda: None)
        by_path.update(_deletion_vectors(file) if file.file_format.name == "PUFFIN" else _position_deletes(file))
        found[file.file_path] = by_path
    return found


def _position_deletes(file: Any) -> Iterator[tuple[str, Any]]:
    place = locate(plain(file.file_path))
    with place.filesystem.open_input_file(place.path) as source:
        table = pq.read_table(source, columns=["file_path", "pos"])
    paths = table.column("file_path").combine_chunks().dictionary_encode()
    codes, positions = paths.indices.to_numpy(), table.column("pos").to_numpy()
    for code, path in enumerate(paths.dictionary.to_pylist()):
        yield path, positions[codes == code]


def _deletion_vectors(file: Any) -> Iterator[tuple[str, Any]]:
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    place = locate(plain(file.file_path))
    with place.filesystem.open_input_file(place.path) as source:
        puffin = PuffinFile(source.read())
    for vector in deletion_vectors_from_puffin_file(puffin):
        yield vector.referenced_data_file, np.asarray(vector.to_vector().to_numpy(), np.int64)


def plain(uri: str) -> str:
    """Local paths without a scheme, and s3a:// as s3://: the forms in which metadata and users write them differ."""
    local = local_path(uri)
    if local is not None:
        return str(local) if "%" not in uri or urlsplit(uri).scheme else unquote(str(local))
    return re.sub(r"^s3[an]://", "s3://", uri).rstrip("/")
