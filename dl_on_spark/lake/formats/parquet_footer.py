"""One order for the only part of a Parquet footer that Spark leaves to chance.

Parquet's Java writer lists a column chunk's encodings in the order of a hash set of enum values, which
differs from one JVM to the next. The list is a set by its meaning (parquet.thrift, ``ColumnMetaData.encodings``),
so sorting it changes nothing for a reader, and the same rows give the same bytes on every night.

The footer is one struct of Thrift's compact protocol; only its shape is walked here:
``FileMetaData.row_groups`` (4) → ``RowGroup.columns`` (1) → ``ColumnChunk.meta_data`` (3) → ``encodings`` (2).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dl_on_spark.errors import TableError

_ENCODINGS = (4, 1, 3, 2)
_TRAILER = 8  # four bytes of length, then PAR1
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_VARINTS = {4, 5, 6}
_LONG_LIST = 15


def sort_encodings(path: Path) -> None:
    """Sort the encodings of every column chunk of the file at `path`, in place.

    For files that nobody reads yet. Raises `TableError` where there is no footer of this shape.
    """
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TRAILER))
        trailer = file.read()
        start = size - _TRAILER - int.from_bytes(trailer[:4], "little")
        if trailer[4:] != b"PAR1" or start < 0:
            raise TableError(f"{path} is not a complete Parquet file.", fix="Run the job again.")
        file.seek(start)
        footer = bytearray(file.read(size - _TRAILER - start))
        try:
            for begin, end in list(_Walk(footer).lists_of_encodings()):
                footer[begin:end] = bytes(sorted(footer[begin:end]))  # each is a varint of one byte
        except IndexError as error:
            raise TableError(f"{path} has a broken footer.", fix="Run the job again.") from error
        file.seek(start)
        file.write(footer)


class _Walk:
    """A position in a Thrift struct of the compact protocol."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._at = 0

    def lists_of_encodings(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of the elements of each list of encodings."""
        yield from self._struct(_ENCODINGS)

    def _struct(self, path: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Read one struct; yield where `path` leads. An empty path leads nowhere."""
        field = 0
        while (head := self._byte()) != 0:
            kind, step = head & 0x0F, head >> 4
            field = field + step if step else _signed(self._varint())
            yield from self._value(kind, path[1:] if path and field == path[0] else None)

    def _value(self, kind: int, path: tuple[int, ...] | None) -> Iterator[tuple[int, int]]:
        """Read one value; `path` is what is left of the way to the encodings, None off the way."""
        if kind in {_TRUE, _FALSE}:
            return  # a field's truth is in its head
        if kind in _VARINTS:
            self._varint()
        elif kind == _BYTE:
            self._at += 1
        elif kind == _DOUBLE:
            self._at += 8
        elif kind == _BINARY:
            length = self._varint()
            self._at += length
        elif kind in {_LIST, _SET}:
            yield from self._list(path)
        elif kind == _MAP:
            self._map()
        elif kind == _STRUCT:
            yield from self._struct(path or ())
        else:
            raise IndexError(f"no Thrift type {kind}")

    def _list(self, path: tuple[int, ...] | None) -> Iterator[tuple[int, int]]:
        head = self._byte()
        kind, size = head & 0x0F, head >> 4
        if size == _LONG_LIST:
            size = self._varint()
        begin = self._at
        for _ in range(size):
            if kind in {_TRUE, _FALSE}:
                self._at += 1
            else:
                yield from self._value(kind, path)
        if path == () and self._at == begin + size:
            yield begin, self._at

    def _map(self) -> None:
        size = self._varint()
        kinds = self._byte() if size else 0
        for _ in range(size):
            for kind in (kinds >> 4, kinds & 0x0F):
                for _ in self._value(kind, None):
                    pass

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)
