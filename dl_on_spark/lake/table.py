"""A table on the lake: where it is, which rows and columns of it, and its snapshot."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from dl_on_spark.errors import TableError
from dl_on_spark.lake import nested, where
from dl_on_spark.lake.formats import FORMATS, iceberg
from dl_on_spark.lake.formats.content import Content
from dl_on_spark.lake.formats.footers import ColumnStatistics, Footer
from dl_on_spark.lake.predicates import Node, Range
from dl_on_spark.lake.row_groups import RowGroupDecoder
from dl_on_spark.lake.snapshot import Counts, DataFile, RowGroups, Snapshot
from dl_on_spark.lake.storage import PathLike, locate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_THREADS = 8


@dataclass(frozen=True)
class Table:
    """A table as a user points at it; nothing is read before `snapshot` or `schema`."""

    uri: str
    format: str = "auto"
    version: str | None = None
    predicate: str | None = None
    columns: tuple[str, ...] | None = None

    def where(self, expression: str) -> Self:
        """The rows for which `expression` is true too; the language is that of `lake.where`."""
        whole = expression if self.predicate is None else f"({self.predicate}) and ({expression})"
        return replace(self, predicate=whole)

    def select(self, columns: Iterable[str]) -> Self:
        """These columns, in this order; a field of a struct by its dotted name."""
        return replace(self, columns=tuple(columns))

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the selected columns, partition columns last when none are selected."""
        schema = self._content()[1].schema
        names = self._selected(schema)
        return schema if names is None else pa.schema([nested.field_of(schema, name) for name in names])

    def snapshot(self, spark: SparkSession | None = None) -> Snapshot:
        """Pin files, row groups and row counts as they are now.

        Partitions and row groups that the filter excludes are left out; where a filter cuts through a
        row group, its rows are counted in one pass over the filter's columns. With `spark`, its executors
        read the footers of a table of more than a few thousand files.
        Raises `TableError` for a table without rows, a filter that matches nothing, an unreadable file,
        files that do not fit each other, an unknown column.
        """
        name, content = self._content(spark)
        columns = self._selected(content.schema)
        groups, certain = _row_groups(content, self.predicate, self.uri)
        if self.predicate is None and len(groups) == 0:
            raise TableError(f"{self.uri} has no rows.", fix="Check the path, or run the ETL for these days first.")
        # Of the files that are read, by name and footer: what the filter leaves out may change.
        used = sorted(set(groups.file.tolist()))
        renumbered = np.searchsorted(np.asarray(used, dtype=np.int64), groups.file)
        digest = hashlib.sha256(
            "\n".join(_described(content.files[i], content.footers[i]) for i in used).encode()
        ).hexdigest()
        snapshot = Snapshot(
            uri=content.root or self.uri,
            format=name,
            version=content.version,
            files=tuple(content.files[i] for i in used),
            row_groups=replace(groups, file=renumbered),
            table_schema=content.schema,
            columns=columns,
            where=self.predicate,
            digest=digest,
        )
        if self.predicate is None:
            return snapshot
        return _counted(snapshot, certain)

    def _content(self, spark: SparkSession | None = None) -> tuple[str, Content]:
        uri = self.uri
        if uri.startswith(f"{iceberg.SCHEME}://"):
            uri = iceberg.address_of(uri)
        place = locate(uri)
        chosen = FORMATS.items() if self.format == "auto" else [(self.format, FORMATS[self.format])]
        for name, module in chosen:
            if module.recognizes(place):
                return name, module.resolve(place, self.version, self.predicate, spark)
        kind = "table" if self.format == "auto" else f"{self.format} table"
        raise TableError(f"{self.uri}: there is no {kind}.", fix="Check the path, or run the ETL first.")

    def _selected(self, schema: pa.Schema) -> tuple[str, ...] | None:
        for name in self.columns or ():
            if nested.path_of(schema, name) is None:
                near = difflib.get_close_matches(name, nested.names_of(schema), n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Columns: {', '.join(schema.names)}."
                raise TableError(f"{self.uri} has no column {name!r}.", fix=hint)
        return self.columns


def open_table(uri: PathLike, format: str = "auto", version: str | int | None = None) -> Table:
    """The table at a local path or URI.

    ``format``: a name of `lake.formats.FORMATS`, or "auto". ``version``: of formats that have versions.
    """
    check_format(format)
    return Table(os.fspath(uri), format, None if version is None else str(version))


def check_format(format: str) -> None:
    """Raise `TableError` for a format that is not known."""
    if format != "auto" and format not in FORMATS:
        raise TableError(f"unknown table format {format!r}.", fix=f"Known: auto, {', '.join(FORMATS)}.")


def _row_groups(content: Content, predicate: str | None, uri: str) -> tuple[RowGroups, np.ndarray[Any, Any]]:
    """Row groups that may hold wanted rows, and for each whether all its rows are wanted for certain."""
    node = None if predicate is None else where.parse(predicate, content.schema, uri)
    counts = [len(footer.rows) for footer in content.footers]
    file = np.repeat(np.arange(len(counts)), counts)
    index = np.concatenate([np.arange(count) for count in counts]) if counts else file
    rows = np.concatenate([footer.rows for footer in content.footers]) if counts else file
    sizes = np.concatenate([footer.bytes for footer in content.footers]) if counts else file
    first_row = np.concatenate([np.cumsum(footer.rows) - footer.rows for footer in content.footers]) if counts else file
    stored, rows = rows, rows - _deleted(content, rows, first_row, counts)
    kept, certain = rows > 0, np.ones(len(rows), bool)
    if node is not None:
        first = 0
        for at, footer in enumerate(content.footers):
            for position, (possible, whole) in enumerate(_outcomes(node, content, at, footer)):
                kept[first + position] &= possible
                certain[first + position] = whole
            first += counts[at]
    chosen = np.flatnonzero(kept)
    columns = [np.asarray(values[chosen], np.int64) for values in (file, index, rows, stored, first_row, sizes)]
    return RowGroups(*columns), certain[chosen]


def _deleted(content: Content, rows: Counts, first_row: Counts, counts: Sequence[int]) -> Counts:
    """How many rows of each row group are deleted."""
    found, at = np.zeros_like(rows), 0
    for file, count in zip(content.files, counts, strict=True):
        if file.deleted:
            first, stored = first_row[at : at + count], rows[at : at + count]
            low, high = (np.searchsorted(file.deleted_rows, edge) for edge in (first, first + stored))
            found[at : at + count] = high - low
        at += count
    return found


def _described(file: DataFile, footer: Footer) -> str:
    """What tells a file's rows from any others', without where the table lies or when it was written."""
    more = [json.dumps(dict(file.stored_as), sort_keys=True) if file.stored_as else "", file.deleted]
    return " ".join([file.path, footer.digest, *(part for part in more if part)])


def _outcomes(node: Node, content: Content, at: int, footer: Footer) -> Iterator[tuple[bool, bool]]:
    """For each row group of a file: whether rows may pass the filter, and whether all do for certain."""
    names = node.columns()
    constants = {n: Range.constant(v) for n, v in content.files[at].partition.items() if n in names}
    if True not in node.outcomes(constants):
        yield from itertools.repeat((False, False), len(footer.rows))
        return
    stored_as = {name: content.files[at].stored_as.get(name, name) for name in names - set(constants)}
    constants.update({name: Range.constant(None) for name, own in stored_as.items() if not own})
    known = {name: footer.statistics[own] for name, own in stored_as.items() if own in footer.statistics}
    for position, rows in enumerate(footer.rows.tolist()):
        ranges = {name: _range(of[position], rows, _type(content.schema, name)) for name, of in known.items()}
        outcomes = node.outcomes({**constants, **{name: found for name, found in ranges.items() if found is not None}})
        yield True in outcomes, outcomes == {True}


def _range(found: ColumnStatistics | None, rows: int, kind: pa.DataType) -> Range | None:
    """What the statistics of a column in one row group say of it."""
    if found is None:
        return None
    low, high, nulls = found
    if not (_comparable(low, kind) and _comparable(high, kind)):
        low = high = None
    return Range(low, high, nulls != 0, nulls is not None and nulls == rows)


def _type(schema: pa.Schema, name: str) -> pa.DataType:
    field = nested.field_of(schema, name)
    assert field is not None  # the filter was parsed with this schema
    return field.type.value_type if pa.types.is_dictionary(field.type) else field.type


def _comparable(value: Any, kind: pa.DataType) -> bool:
    """Whether a statistic has the Python type that filter values of this column have."""
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return isinstance(value, (int, float)) and not math.isnan(value)
    if pa.types.is_decimal(kind):
        return isinstance(value, Decimal)
    if pa.types.is_timestamp(kind):
        return hasattr(value, "tzinfo") and (value.tzinfo is None) == (kind.tz is None)
    return isinstance(value, str) or pa.types.is_date(kind)


def _counted(snapshot: Snapshot, certain: np.ndarray[Any, Any]) -> Snapshot:
    """`snapshot` with the rows that pass its filter; row groups and files without any are dropped."""
    groups = snapshot.row_groups
    rows = groups.rows.copy()
    open_ones: Sequence[int] = np.flatnonzero(~certain).tolist()
    if open_ones:
        with RowGroupDecoder(snapshot, use_threads=False) as decoder, ThreadPoolExecutor(_THREADS) as pool:
            rows[open_ones] = list(pool.map(decoder.count, open_ones))
    kept = np.flatnonzero(rows)
    if kept.size == 0:
        raise TableError(
            f"filter {snapshot.where!r} matches no rows of {snapshot.uri}.",
            fix="Widen the filter, or run the ETL for the days it names.",
        )
    used = np.unique(groups.file[kept])
    left = replace(groups, rows=rows).some(kept)
    return replace(
        snapshot,
        files=tuple(snapshot.files[i] for i in used.tolist()),
        row_groups=replace(left, file=np.searchsorted(used, left.file)),
    )
