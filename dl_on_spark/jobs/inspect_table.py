"""`dl-on-spark table inspect`: what a table is, what of it can be fed, and how it would split over workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from dl_on_spark.input_pipeline import SamplePlan, open_table
from dl_on_spark.input_pipeline.feedable import field_spec, missing_for, stored_as
from dl_on_spark.lake import Schema, Snapshot

_SMALL_FILE = 8 * 2**20
_LARGE_ROW_GROUP = 512 * 2**20


@dataclass(frozen=True)
class Column:
    """``fed``: dtype and shape of one row; empty where it cannot be fed as it is, and then ``needs`` says why."""

    name: str
    type: str
    fed: str
    needs: str


@dataclass(frozen=True)
class Share:
    """One worker's part of an epoch. ``row_groups``: decoded by it; those on a boundary count for both sides."""

    rank: int
    rows: int
    row_groups: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """``rows_per_row_group``: least, median, most. ``bytes``: uncompressed; ``file_bytes``: as stored."""

    uri: str
    format: str
    version: str | None
    fingerprint: str
    where: str | None
    rows: int
    files: int
    file_bytes: int
    row_groups: int
    bytes: int
    rows_per_row_group: tuple[int, int, int]
    partitions: dict[str, int]
    columns: tuple[Column, ...]
    global_batch_size: int
    steps_per_epoch: int
    shares: tuple[Share, ...]
    advice: tuple[str, ...]


def inspect(
    uri: str,
    *,
    format: str = "auto",
    version: str | None = None,
    where: str | None = None,
    schema: Schema | None = None,
    num_workers: int = 2,
    global_batch_size: int = 1024,
) -> Inspection:
    """Pin the table and describe it; with a `schema`, columns are fed as it says. Without `where`, no row is read."""
    table = open_table(uri, format, version)
    snapshot = (table if where is None else table.where(where)).snapshot()
    groups = snapshot.row_groups
    plan = SamplePlan.create(groups.rows, num_workers=num_workers, global_batch_size=global_batch_size, seed=0)
    shares = tuple(_share(plan, snapshot, rank, num_workers) for rank in range(num_workers))
    names = list(snapshot.files[0].partition)
    return Inspection(
        uri=snapshot.uri,
        format=snapshot.format,
        version=snapshot.version,
        fingerprint=snapshot.fingerprint,
        where=where,
        rows=snapshot.rows,
        files=len(snapshot.files),
        file_bytes=sum(file.size for file in snapshot.files),
        row_groups=snapshot.num_row_groups,
        bytes=snapshot.bytes,
        rows_per_row_group=(int(groups.rows.min()), int(np.median(groups.rows)), int(groups.rows.max())),
        partitions={name: len({file.partition[name] for file in snapshot.files}) for name in names},
        columns=tuple(_column(field, schema) for field in snapshot.schema),
        global_batch_size=global_batch_size,
        steps_per_epoch=plan.steps_per_epoch,
        shares=shares,
        advice=tuple(_advice(snapshot, num_workers)),
    )


def show(found: Inspection, console: Console) -> None:
    """Print an inspection as tables."""
    facts = Grid(title=found.uri, show_header=False, title_justify="left", title_style="bold")
    least, median, most = found.rows_per_row_group
    version = "" if found.version is None else f", version {found.version}"
    facts.add_row("format", f"{found.format}{version}")
    facts.add_row("fingerprint", found.fingerprint)
    if found.where is not None:
        facts.add_row("where", found.where)
    facts.add_row("rows", f"{found.rows:,}")
    facts.add_row("files", f"{found.files:,} ({_size(found.file_bytes)})")
    facts.add_row("row groups", f"{found.row_groups:,} ({_size(found.bytes)} decoded)")
    facts.add_row("rows of a row group", f"{least:,} to {most:,}, median {median:,}")
    for name, values in found.partitions.items():
        facts.add_row(f"partition {name}", f"{values:,} values")
    columns = Grid(
        "column", "type", "a row's tensor", "to feed it, the schema needs", title="Columns", title_justify="left"
    )
    for column in found.columns:
        columns.add_row(column.name, escape(column.type), column.fed or "[red]none[/]", column.needs)
    split = Grid(
        "worker",
        "rows",
        "row groups",
        "decoded",
        title=f"Split over {len(found.shares)} workers: {found.steps_per_epoch:,} steps an epoch "
        f"of {found.global_batch_size:,} rows",
        title_justify="left",
    )
    for share in found.shares:
        split.add_row(str(share.rank), f"{share.rows:,}", f"{share.row_groups:,}", _size(share.bytes))
    console.print(facts, columns, split)
    for line in found.advice:
        console.print(f"[yellow]•[/] {line}", highlight=False)


def as_dict(found: Inspection) -> dict[str, Any]:
    """Plain values, for JSON."""
    return asdict(found)


def _share(plan: SamplePlan, snapshot: Snapshot, rank: int, num_workers: int) -> Share:
    streams = plan.streams(0, plan.rank_streams(rank, num_workers))
    groups = {segment.group for stream in streams for segment in stream.segments}
    return Share(
        rank,
        sum(stream.rows for stream in streams),
        len(groups),
        int(snapshot.row_groups.bytes[sorted(groups)].sum()),
    )


def _column(field: pa.Field, schema: Schema | None) -> Column:
    kind = stored_as(field)
    if schema is not None:
        if field.name not in schema:
            return Column(field.name, kind, "", "a field of this name")
        known = schema[field.name]
        shape, dtype = known.tensor_spec()
        return Column(field.name, kind, f"{dtype} {list(shape)} ({known.role or 'not read'})", "")
    spec = field_spec(field)
    if spec is None:
        return Column(field.name, kind, "", missing_for(field))
    stored = Schema.from_dict({"name": "as_stored", "fields": {field.name: spec}})
    shape, dtype = stored[field.name].tensor_spec()
    return Column(field.name, kind, f"{dtype} {list(shape)}", "")


def _advice(snapshot: Snapshot, num_workers: int) -> list[str]:
    groups, found = snapshot.row_groups, []
    if snapshot.num_row_groups < num_workers:
        found.append(
            f"{snapshot.num_row_groups} row groups for {num_workers} workers: some row groups are decoded by several. "
            "Write smaller row groups."
        )
    if int(groups.bytes.max()) > _LARGE_ROW_GROUP:
        found.append(
            f"A row group of {_size(int(groups.bytes.max()))} decoded: a worker holds several at once. "
            "Write row groups of 64 to 128 MB."
        )
    mean = sum(file.size for file in snapshot.files) // len(snapshot.files)
    if len(snapshot.files) > 1_000 and mean < _SMALL_FILE:
        found.append(
            f"{len(snapshot.files):,} files of {_size(mean)} on average: opening them costs more than reading. "
            "Compact the table."
        )
    wasted = 1 - snapshot.rows / int(groups.stored_rows.sum())
    if wasted > 0.5:
        found.append(
            f"{wasted:.0%} of the rows that are decoded do not pass the filter. "
            "Partition or sort the table by its columns."
        )
    return found


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
