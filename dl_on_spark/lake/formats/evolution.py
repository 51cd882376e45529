"""How a file stores the columns of a table whose schema has changed since: renamed, added, not yet there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from dl_on_spark.lake import nested
from dl_on_spark.lake.formats.footers import Footer
from dl_on_spark.lake.snapshot import DataFile


def with_stored_names(
    files: Sequence[DataFile], footers: Sequence[Footer], names: Sequence[Mapping[str, str]]
) -> tuple[DataFile, ...]:
    """The files, each with what differs between the table's names and its own.

    ``names``: for each file, the name it would have of each of the table's columns (dotted inside structs); '' where
    it is known to lack the column.
    """
    known: dict[tuple[int, int], dict[str, str]] = {}
    found = []
    for file, footer, wanted in zip(files, footers, names, strict=True):
        key = id(footer.schema), id(wanted)  # files mostly share both
        if key not in known:
            known[key] = _stored_as(footer.schema, wanted)
        found.append(replace(file, stored_as=known[key]))
    return tuple(found)


def _stored_as(schema: pa.Schema, wanted: Mapping[str, str]) -> dict[str, str]:
    stored = {name: own if own and nested.path_of(schema, own) is not None else "" for name, own in wanted.items()}
    return {name: own for name, own in stored.items() if own != name}
