"""Tensors in binary cells: each comes out as it went in, and a wrong cell is named and never guessed at."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import MissingExtraError, SchemaError
from dl_on_spark.lake import codecs
from dl_on_spark.lake.codecs import TensorSpec

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64"]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def decoded(cells: Any, spec: TensorSpec) -> np.ndarray:
    column = cells if isinstance(cells, pa.Array | pa.ChunkedArray) else pa.array(cells, pa.binary())
    return codecs.decode(column, spec, "Column 'x'").to_numpy(zero_copy_only=False).reshape(-1, *spec.shape)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorSpec, list[np.ndarray | None]]:
    codec = draw(st.sampled_from(["ndarray", "compressed_ndarray"]))
    dtype, shape = draw(st.sampled_from(DTYPES)), tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    nulls = draw(st.lists(st.booleans(), max_size=7))
    rows = [None if null else random.integers(0, 2, shape).astype(dtype) for null in nulls]
    return TensorSpec(codec, dtype, shape), rows


@settings(deadline=None)
@given(tensors(), st.integers(0, 2), st.booleans())
def test_every_tensor_comes_back_and_nulls_stay_nulls(
    case: tuple[TensorSpec, list[np.ndarray | None]], skip: int, large: bool
) -> None:
    spec, rows = case
    column = codecs.encode(rows, spec, "x")
    if large:
        column = column.cast(pa.large_binary())
    column = column.slice(skip)  # offsets that do not begin at 0
    column = pa.chunked_array([*column.slice(0, 2).chunks, *column.slice(2).chunks], column.type)
    found = codecs.decode(column, spec, "x")
    size = int(np.prod(spec.shape))
    expected = [value for row in rows[skip:] for value in ([None] * size if row is None else row.reshape(-1).tolist())]
    assert found.to_pylist() == expected
    assert found.type == pa.from_numpy_dtype(np.dtype(spec.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_written_at_once_are_the_files_that_numpy_writes(dtype: str) -> None:
    values = np.arange(24).reshape(4, 2, 3).astype(dtype)
    column = codecs.encode(values, TensorSpec("ndarray", dtype, (2, 3)), "x")
    assert column.to_pylist() == [npy(row) for row in values]
    assert np.array_equal(decoded(column, TensorSpec("ndarray", dtype, (2, 3))), values)


def test_fortran_order_other_byte_orders_and_mixed_headers_are_understood() -> None:
    values = [np.arange(6.0).reshape(2, 3) + i for i in range(4)]
    cells = [npy(values[0]), npy(np.asfortranarray(values[1])), npy(values[2].astype(">f8")), npy(values[3])]
    assert np.array_equal(decoded(cells, TensorSpec("ndarray", "float64", (2, 3))), values)
    alike = [npy(np.asfortranarray(value)) for value in values]
    assert np.array_equal(decoded(alike, TensorSpec("ndarray", "float64", (2, 3))), values)


def test_smaller_tensors_are_padded_and_larger_ones_refused() -> None:
    cells = [npy(np.ones((1, 2), np.int16)), None, npy(np.ones((0, 2), np.int16)), npy(np.ones((2, 3), np.int16))]
    spec = TensorSpec("ndarray", "int16", (2, 3), pad=7)
    found = codecs.decode(pa.array(cells, pa.binary()), spec, "x").to_pylist()
    assert found == [1, 1, 7, 7, 7, 7, *[None] * 6, *[7] * 6, *[1] * 6]
    with pytest.raises(SchemaError, match=r"Column 'x', row 3: a tensor .*\[2, 3\] .* asks for \[2, 2\] at most"):
        decoded(cells, TensorSpec("ndarray", "int16", (2, 2), pad=0))


GOOD = npy(np.zeros((2, 3), np.float32))
NPZ = TensorSpec("compressed_ndarray", "float32", (2, 3))
ARCHIVE = codecs.encode([np.zeros((2, 3), np.float32)], NPZ, "")[0].as_py()


def archive(name: str, data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr(name, data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("codec", "cell", "said"),
    [
        ("ndarray", GOOD[:-1], "a truncated .npy: 23 bytes of values instead of 24"),
        ("ndarray", GOOD + b"x", "a too long .npy"),
        ("ndarray", GOOD[:40], "no .npy"),
        ("ndarray", GOOD[:7], "no .npy"),
        ("ndarray", b"", "no .npy"),
        ("ndarray", b"PK\x03\x04" + GOOD, "no .npy: it begins with"),
        ("ndarray", npy(np.zeros((3, 2), np.float32)), r"a tensor of shape \[3, 2\] where .* \[2, 3\]"),
        ("ndarray", npy(np.zeros((2, 3))), "a tensor of float64 where the schema asks for float32"),
        ("ndarray", npy(np.array([["a", "b", "c"]] * 2)), "a tensor of <U1"),
        ("ndarray", npy(np.array([[{}] * 3] * 2, object)), "an object array, which only unpickling could read"),
        ("compressed_ndarray", ARCHIVE[:-9], "no .npz"),
        ("compressed_ndarray", archive("other.npy", GOOD), "an .npz without arr.npy"),
        ("compressed_ndarray", archive("arr.npy", GOOD[:-1]), "a truncated .npy"),
        ("compressed_ndarray", archive("arr.npy", npy(np.zeros(10**6))), "an .npz of float64 .*1000000"),
        ("compressed_ndarray", archive("arr.npy", npy(np.array([[{}] * 3] * 2, object))), "an object array"),
        ("compressed_ndarray", GOOD, "no .npz"),
        ("png", GOOD, "a png image that is damaged, or none"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_wrong_cell_is_refused_with_its_row(codec: str, cell: bytes, said: str, first: bool) -> None:
    spec = TensorSpec(codec, "float32", (2, 3))
    if codec == "png":
        good: Any = codecs.encode([np.zeros((2, 3), np.uint8)], TensorSpec("png", "uint8", (2, 3)), "")[0].as_py()
        spec = TensorSpec(codec, "uint8", (2, 3))
    else:
        good = ARCHIVE if codec == "compressed_ndarray" else GOOD
    cells = [cell, good] if first else [good, None, good, cell, good]
    with pytest.raises(SchemaError, match=rf"^Column 'x', row {0 if first else 3}: {said}"):
        decoded(cells, spec)


@given(st.data())
@settings(deadline=None)
def test_a_damaged_cell_never_becomes_anything_else_than_an_error_or_a_tensor(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(["ndarray", "compressed_ndarray", "png", "jpeg"]))
    dtype = "uint8" if codec in {"png", "jpeg"} else "float32"
    spec = TensorSpec(codec, dtype, (8, 8))
    cell = bytearray(codecs.encode([np.arange(64).reshape(8, 8).astype(dtype)], spec, "")[0].as_py())
    for _ in range(data.draw(st.integers(0, 3))):
        cell[data.draw(st.integers(0, len(cell) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert decoded([bytes(cell[: data.draw(st.integers(0, len(cell)))])], spec).shape == (1, 8, 8)
    except SchemaError as error:
        assert str(error).startswith("Column 'x', row 0: ")


def test_a_column_of_nothing_but_nulls_is_nulls() -> None:
    spec = TensorSpec("ndarray", "float32", (2,))
    assert codecs.decode(pa.array([None, None], pa.binary()), spec, "x").to_pylist() == [None] * 4
    assert len(codecs.decode(pa.chunked_array([], pa.binary()), spec, "x")) == 0


def picture(mode: str, size: tuple[int, int], format: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, size).save(file, format)
    return file.getvalue()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (picture("RGBA", (3, 2)), "an image of mode RGBA"),
        (picture("P", (3, 2)), "an image of mode P"),
        (picture("RGB", (3, 2)), r"a tensor of shape \[2, 3, 3\] where the schema asks for \[2, 3\]"),
        (picture("L", (3, 2), "JPEG"), "a png image that is damaged, or none"),
        (picture("L", (9_000, 9_000)), r"a tensor of shape \[9000, 9000\]"),
    ],
)
def test_images_of_other_kinds_are_refused(cell: bytes, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        decoded([cell], TensorSpec("png", "uint8", (2, 3)))


def test_a_colour_png_of_16_bits_is_refused_because_pillow_would_cut_its_values() -> None:
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1).to_bytes(4, "big") * 2 + b"\x10\x02\0\0\0"

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    cell = head + zlib.crc32(head[12:]).to_bytes(4, "big")
    cell += chunk(b"IDAT", zlib.compress(b"\0" * 7)) + chunk(b"IEND", b"")
    with pytest.raises(SchemaError, match="a colour image of 16 bits a channel; 8 can be read"):
        decoded([cell], TensorSpec("png", "uint8", (1, 1, 3)))


def test_images_without_pillow_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"dl_on_spark\[images\]"):
        decoded([b""], TensorSpec("png", "uint8", (2, 3)))


def test_a_tensor_that_does_not_fit_the_schema_is_not_written() -> None:
    spec = TensorSpec("ndarray", "float32", (2,))
    with pytest.raises(SchemaError, match=r"x, row 1: a tensor float64 \[2\] where the schema asks for float32 \[2\]"):
        codecs.encode([np.zeros(2, np.float32), np.zeros(2)], spec, "x")
    with pytest.raises(SchemaError, match=r"x, row 0: a tensor float32 \[3\]"):
        codecs.encode(np.zeros((2, 3), np.float32), spec, "x")
