"""Row groups of a pinned snapshot become Arrow tables: filtered, with partition columns, in one schema."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from dl_on_spark.errors import TableError
from dl_on_spark.lake import nested, where
from dl_on_spark.lake.snapshot import Snapshot
from dl_on_spark.lake.storage import locate

_OPEN_FILES = 64
# Of files that have checksums, as Spark's: a flipped bit would train unseen. pyarrow 14 cannot verify them.
_VERIFIES = "page_checksum_verification" in inspect.signature(pq.ParquetFile.__init__).parameters
_CHECKSUMS: dict[str, Any] = {"page_checksum_verification": True} if _VERIFIES else {}


class RowGroupDecoder:
    """Decodes row groups of `snapshot`; safe to call from several threads.

    ``columns``: which of the snapshot's columns (default: all); a field of a struct by its dotted name, of which
    no other field is read. ``use_threads``: decode columns of a
    row group side by side. ``dictionary_text``: text columns come dictionary-encoded, as Parquet mostly
    stores them, instead of as one string per row. Open files are kept, at most 64 of them.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        columns: Sequence[str] | None = None,
        use_threads: bool = True,
        *,
        dictionary_text: bool = False,
    ) -> None:
        self._snapshot = snapshot
        names = list(snapshot.schema.names if columns is None else columns)
        fields = {name: nested.field_of(snapshot.schema, name) for name in names}
        missing = [name for name in names if fields[name] is None]
        if missing:
            raise TableError(
                f"{snapshot.uri} has no column {missing[0]!r} (columns: {', '.join(snapshot.schema.names)}).",
                fix="Mend the selection or the schema file.",
            )
        self._schema = pa.schema(list(fields.values()))
        self._use_threads = use_threads
        self._place = locate(snapshot.uri)
        self._local = isinstance(self._place.filesystem, pafs.LocalFileSystem)
        self._partition_names = set(snapshot.files[0].partition) if snapshot.files else set()
        self._filter: Any = None
        self._filter_columns: set[str] = set()
        if snapshot.where is not None:
            node = where.parse(snapshot.where, snapshot.table_schema, snapshot.uri)
            self._filter, self._filter_columns = node.expression(), node.columns()
        self._dictionaries = [
            field.name
            for field in self._schema
            if dictionary_text
            and (pa.types.is_string(field.type) or pa.types.is_large_string(field.type))
            and field.name not in self._filter_columns | self._partition_names
        ]
        self._files: OrderedDict[tuple[int, int], pq.ParquetFile] = OrderedDict()
        self._lock = threading.Lock()

    def __enter__(self) -> RowGroupDecoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def decode(self, i: int) -> pa.Table:
        """Rows of row group `i` that pass the filter, in file order; columns as selected.

        Raises `TableError` naming the file when it vanished or changed since it was pinned.
        """
        groups = self._snapshot.row_groups
        kept = self._kept(i)
        stored = int(groups.stored_rows[i]) if kept is None else int(kept.sum())
        filtered = self._filter is not None and int(groups.rows[i]) != stored
        table = self._read(i, self._schema, self._filter_columns if filtered else set())
        if kept is not None:
            table = table.filter(pa.array(kept))
        if filtered:
            table = table.filter(self._filter).select(self._schema.names)
        return table

    def count(self, i: int) -> int:
        """How many rows of row group `i` pass the filter; reads the filter's columns alone."""
        table, kept = self._read(i, pa.schema([]), self._filter_columns), self._kept(i)
        if kept is not None:
            table = table.filter(pa.array(kept))
        return int(table.filter(self._filter).num_rows)

    def _kept(self, i: int) -> npt.NDArray[np.bool_] | None:
        """Which rows of a row group the table still has, deletion vectors and delete files applied; None: all."""
        groups = self._snapshot.row_groups
        deleted = self._snapshot.files[int(groups.file[i])].deleted_rows
        first, rows = int(groups.first_row[i]), int(groups.stored_rows[i])
        low, high = np.searchsorted(deleted, (first, first + rows))
        if low == high:
            return None
        kept = np.ones(rows, bool)
        kept[deleted[low:high] - first] = False
        return kept

    def _read(self, i: int, schema: pa.Schema, more: set[str]) -> pa.Table:
        groups = self._snapshot.row_groups
        index = int(groups.file[i])
        data_file = self._snapshot.files[index]
        of_table = self._snapshot.table_schema
        wanted = [*schema, *(nested.field_of(of_table, name) for name in sorted(more - set(schema.names)))]
        stored_as = {field.name: data_file.stored_as.get(field.name, field.name) for field in wanted}
        stored = [stored_as[f.name] for f in wanted if f.name not in self._partition_names and stored_as[f.name]]
        try:
            source = self._open(index)
            table = source.read_row_group(int(groups.index[i]), columns=stored, use_threads=self._use_threads)
            if stored and table.num_rows != int(groups.stored_rows[i]):
                raise OSError(f"row group {groups.index[i]} has {table.num_rows} rows")
        except (OSError, pa.ArrowException, IndexError, KeyError) as error:
            raise TableError(
                f"{self._snapshot.uri}: {data_file.path or 'the file'} cannot be read: "
                f"{' '.join(str(error).split()).rstrip('.')}.",
                fix="It is damaged, or was replaced after the run began. Mend it where it is damaged; start a new run.",
            ) from error
        rows = int(groups.stored_rows[i])
        columns = []
        for field in wanted:
            if field.name in self._partition_names:
                columns.append(pa.repeat(pa.scalar(data_file.partition[field.name], field.type), rows))
            elif not stored_as[field.name]:
                columns.append(pa.nulls(rows, field.type))
            else:
                path = nested.path_of(table.schema, stored_as[field.name])
                assert path is not None  # it was just read
                column = nested.column_of(table, path)
                kept = column.type == field.type or (
                    field.name in self._dictionaries and pa.types.is_dictionary(column.type)
                )
                columns.append(column if kept else column.cast(field.type))
        if not columns:  # only a row count is asked for
            return table
        return pa.table(columns, names=[field.name for field in wanted])

    def _open(self, index: int) -> pq.ParquetFile:
        """This thread's handle of a file: Parquet readers are not shared between threads."""
        key = (threading.get_ident(), index)
        with self._lock:
            found = self._files.get(key)
            if found is not None:
                self._files.move_to_end(key)
                return found
        data_file = self._snapshot.files[index]
        path = f"{self._place.path}/{data_file.path}" if data_file.path else self._place.path
        size = self._place.filesystem.get_file_info(path).size
        if size != data_file.size:
            state = "vanished" if size is None else f"has {size} bytes instead of {data_file.size}"
            raise TableError(
                f"{self._snapshot.uri}: {data_file.path or 'the file'} {state} since the table was pinned.",
                fix="Start a new run, which pins the table as it is now.",
            )
        # Not a memory map: its pages would count as the reader's memory, and a file that shrinks
        # under it would kill the process.
        source = self._place.filesystem.open_input_file(path)
        opened = pq.ParquetFile(
            source,
            pre_buffer=not self._local,
            read_dictionary=[own for name in self._dictionaries if (own := data_file.stored_as.get(name, name))],
            coerce_int96_timestamp_unit="us",  # nanoseconds would wrap far years
            **_CHECKSUMS,
        )
        with self._lock:
            self._files[key] = opened
            # Another thread's file may be in use: only this thread's own are closed.
            mine = [k for k in self._files if k[0] == key[0]]
            for old in mine[: max(0, len(mine) - _OPEN_FILES)]:
                self._files.pop(old).close()
        return opened
