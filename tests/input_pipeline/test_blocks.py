"""Arrays of a block: one aligned allocation; rows of a window in its order."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.input_pipeline.blocks import WindowRows, allocate, row_bytes
from dl_on_spark.input_pipeline.tensors import encoded_text

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(["int8", "bool", "int32", "float64", "object"]).map(np.dtype)


@given(st.dictionaries(st.text(max_size=3), st.tuples(SHAPES, DTYPES), min_size=1, max_size=6))
def test_arrays_allocated_together_are_aligned_writable_and_apart(
    wanted: dict[str, tuple[tuple[int, ...], np.dtype[Any]]],
) -> None:
    arrays = allocate(wanted)
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == wanted
    for number, array in enumerate(arrays.values()):
        assert array.dtype.hasobject or array.ctypes.data % 64 == 0
        array[...] = number % 2
    for number, array in enumerate(arrays.values()):
        assert (array == number % 2).all()


def test_rows_of_a_window_come_in_its_order_in_all_columns_alike() -> None:
    columns = {
        "id": np.arange(4),
        "pair": np.arange(8).reshape(4, 2),
        "name": encoded_text(pa.array(["a", "b", "a", "c"])),
    }
    rows = WindowRows(columns, np.asarray([3, 0, 1, 2])).part(0, 3)
    assert rows.column("id").tolist() == [3, 0, 1]
    assert rows.column("pair").tolist() == [[6, 7], [0, 1], [2, 3]]
    assert rows.column("name").tolist() == ["c", "a", "b"]
    in_file_order = WindowRows(columns, None).part(1, 4)
    assert in_file_order.column("id").tolist() == [1, 2, 3]
    assert in_file_order.column("name").tolist() == ["b", "a", "c"]


def test_row_bytes_count_every_value_and_a_pointer_for_text() -> None:
    assert row_bytes({"a": ((), "int32"), "b": ((2, 3), "float64"), "c": ((), "string")}) == 4 + 48 + 8
