"""The encodings of a footer are sorted, and nothing else in the file changes."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import TableError
from dl_on_spark.lake.formats.parquet_footer import _Walk, sort_encodings


def footer_of(data: bytes) -> tuple[int, bytearray]:
    length = int.from_bytes(data[-8:-4], "little")
    return len(data) - 8 - length, bytearray(data[len(data) - 8 - length : -8])


def shuffled(data: bytes, order: random.Random) -> bytes:
    """The file as another JVM might have written it."""
    start, footer = footer_of(data)
    for begin, end in list(_Walk(footer).lists_of_encodings()):
        found = list(footer[begin:end])
        order.shuffle(found)
        footer[begin:end] = bytes(found)
    return data[:start] + bytes(footer) + data[-8:]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.integers(1, 40), rows=st.integers(0, 50), group=st.integers(1, 20), seed=st.integers(0, 9))
def test_one_file_in_any_order_of_its_encodings_becomes_the_same_bytes(
    tmp_path: Path, columns: int, rows: int, group: int, seed: int
) -> None:
    makers = [
        lambda i: pa.array([f"\x15\x02\x19%{k % 3}" for k in range(rows)]),  # looks like a footer's own bytes
        lambda i: pa.array([None if k % 4 == i % 4 else k / 3 for k in range(rows)], pa.float64()),
        lambda i: pa.array([[k] * (k % 3) for k in range(rows)], pa.list_(pa.int64())),
        lambda i: pa.array(
            [{"a": k, "b": bool(k % 2)} for k in range(rows)], pa.struct({"a": pa.int8(), "b": pa.bool_()})
        ),
    ]
    table = pa.table({f"c{i}": makers[i % len(makers)](i) for i in range(columns)}).replace_schema_metadata({"k": "v"})
    file = tmp_path / "part.parquet"
    pq.write_table(table, file, row_group_size=group, write_page_index=seed % 2 == 0)
    given_bytes = file.read_bytes()
    walked = list(_Walk(footer_of(given_bytes)[1]).lists_of_encodings())
    assert len(walked) == pq.read_metadata(file).num_columns * pq.read_metadata(file).num_row_groups
    sort_encodings(file)
    ordered = file.read_bytes()
    file.write_bytes(shuffled(given_bytes, random.Random(seed)))
    sort_encodings(file)
    assert file.read_bytes() == ordered
    assert pq.read_table(file).equals(table)
    changed = [i for i, (a, b) in enumerate(zip(given_bytes, ordered, strict=True)) if a != b]
    start = footer_of(given_bytes)[0]
    inside = {start + i for begin, end in walked for i in range(begin, end)}
    assert set(changed) <= inside


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "part.parquet"
    pq.write_table(pa.table({"a": [1]}), file)
    whole = file.read_bytes()
    for broken in (b"", b"PAR1", whole[:-5], b"PAR1" + (99).to_bytes(4, "little") + b"PAR1"):
        file.write_bytes(broken)
        with pytest.raises(TableError, match=r"part\.parquet"):
            sort_encodings(file)
