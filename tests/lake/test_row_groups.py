"""Decoding of row groups: the rows that were pinned, from several threads, or an error that names the file."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import TableError
from dl_on_spark.lake import RowGroupDecoder, open_table


@pytest.fixture
def table(tmp_path):
    """Two files of three row groups of four rows; x counts up."""
    for n in range(2):
        (tmp_path / f"part={n}").mkdir()
        rows = pa.table({"x": range(12 * n, 12 * n + 12), "s": [f"v{i % 3}" for i in range(12)]})
        pq.write_table(rows, tmp_path / f"part={n}" / "a.parquet", row_group_size=4)
    return open_table(tmp_path)


def test_a_row_group_has_the_columns_asked_for_in_the_table_schema(table) -> None:
    with RowGroupDecoder(table.snapshot(), ["part", "x"]) as decoder:
        assert decoder.decode(4).to_pydict() == {"part": [1] * 4, "x": [16, 17, 18, 19]}
        assert decoder.decode(0).schema == pa.schema([("part", pa.int32()), ("x", pa.int64())])
    with RowGroupDecoder(table.snapshot(), ["part"]) as decoder:
        assert decoder.decode(5).to_pydict() == {"part": [1] * 4}


def test_text_comes_as_dictionary_only_when_asked_for(table) -> None:
    snapshot = table.snapshot()
    with RowGroupDecoder(snapshot, dictionary_text=True) as coded, RowGroupDecoder(snapshot) as plain:
        assert pa.types.is_dictionary(coded.decode(1).column("s").type)
        assert plain.decode(1).column("s").type == pa.string()
        assert coded.decode(1).to_pydict() == plain.decode(1).to_pydict()


def test_many_threads_decode_with_one_decoder(table) -> None:
    snapshot = table.where("x != 5").snapshot()
    together = threading.Barrier(4)

    def all_rows(start: int) -> list[int]:
        together.wait(timeout=30)
        order = [(start + i) % snapshot.num_row_groups for i in range(snapshot.num_row_groups)]
        return sorted(x for i in order for x in decoder.decode(i).column("x").to_pylist())

    with RowGroupDecoder(snapshot, ["x"]) as decoder, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(all_rows, range(4))) == [[x for x in range(24) if x != 5]] * 4


def test_more_files_than_may_be_open_are_read_again_and_again(tmp_path) -> None:
    for n in range(70):
        pq.write_table(pa.table({"x": [n]}), tmp_path / f"{n:03}.parquet")
    with RowGroupDecoder(open_table(tmp_path).snapshot()) as decoder:
        for _ in range(2):
            assert [decoder.decode(i)["x"][0].as_py() for i in range(70)] == list(range(70))


@pytest.mark.parametrize("damage", ["vanished", "longer", "same size", "fewer row groups"])
def test_a_file_that_changed_since_it_was_pinned_is_named(table, tmp_path, damage) -> None:
    snapshot = table.snapshot()
    path = tmp_path / "part=1" / "a.parquet"
    content = path.read_bytes()
    if damage == "vanished":
        path.unlink()
    elif damage == "longer":
        path.write_bytes(content + b"x")
    elif damage == "same size":
        path.write_bytes(bytes(len(content)))
    else:
        sizes = [size for size in snapshot.files if size.path == "part=1/a.parquet"]
        pq.write_table(pa.table({"x": [1], "s": ["a"]}), path)
        with path.open("ab") as file:
            file.write(b"x" * (sizes[0].size - path.stat().st_size))
    with RowGroupDecoder(snapshot) as decoder:
        assert decoder.decode(0).num_rows == 4
        with pytest.raises(TableError, match=r"part=1/a\.parquet") as caught:
            decoder.decode(5)
    assert "new run" in (caught.value.fix or "")


def test_a_column_that_is_not_there_is_named_with_those_that_are(table) -> None:
    with pytest.raises(TableError, match=r"no column 'y' \(columns: x, s, part\)"):
        RowGroupDecoder(table.snapshot(), ["x", "y"])


def test_a_bit_that_flipped_in_a_file_with_checksums_is_found(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [0.5] * 99}), path, write_page_checksum=True, use_dictionary=False, compression=None)
    content = bytearray(path.read_bytes())
    content[content.index(b"\0\0\0\0\0\0\xe0\x3f" * 9) + 6] ^= 1
    path.write_bytes(content)
    with RowGroupDecoder(open_table(path).snapshot()) as decoder, pytest.raises(TableError, match="checksum"):
        decoder.decode(0)
