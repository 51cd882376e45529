"""Arrays of a block: one aligned allocation; a shuffle that keeps columns, and text encoded."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.input_pipeline.blocks import allocate, row_bytes, shuffled
from dl_on_spark.input_pipeline.tensors import EncodedText, encoded_text

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


def test_shuffled_moves_the_rows_of_all_columns_alike_and_leaves_text_encoded() -> None:
    columns = {
        "id": np.arange(4),
        "pair": np.arange(8).reshape(4, 2),
        "name": encoded_text(pa.array(["a", "b", "a", "c"])),
    }
    moved = shuffled(columns, np.asarray([3, 0, 1, 2]))
    name = moved["name"]
    assert isinstance(name, EncodedText)
    assert list(moved) == ["id", "pair", "name"]
    assert moved["id"].tolist() == [3, 0, 1, 2]
    assert moved["pair"].tolist() == [[6, 7], [0, 1], [2, 3], [4, 5]]
    assert name.to_numpy().tolist() == ["c", "a", "b", "a"]
    assert shuffled(columns, None) is columns


def test_row_bytes_count_every_value_and_a_pointer_for_text() -> None:
    assert row_bytes({"a": ((), "int32"), "b": ((2, 3), "float64"), "c": ((), "string")}) == 4 + 48 + 8
