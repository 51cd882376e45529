"""Tables of tensors that we write: read back value by value; petastorm's own reading is in tests/interop."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import InputError, SchemaError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import Schema, describe_tensors, write_tensors

SCHEMA = """
name: ours
fields:
  id: {type: bigint, nullable: false, role: feature}
  text: {type: string, nulls: {fill: none}, role: feature}
  day: {type: date, role: feature}
  at: {type: timestamp, role: feature}
  price: {type: "decimal(8,2)", role: feature}
  x: {type: binary, codec: ndarray, shape: [2, 3], nullable: false, role: feature}
  z: {type: binary, codec: compressed_ndarray, dtype: float64, shape: [2], nulls: {fill: -1}, role: feature}
  image: {type: binary, codec: png, shape: [4, 5, 3], role: feature}
  series: {type: binary, codec: ndarray, dtype: int16, shape: [3], pad: 0, role: feature}
"""


def batches(count: int = 2, rows: int = 4) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(3)
    for first in range(0, count * rows, rows):
        yield {
            "id": np.arange(first, first + rows),
            "text": ["a", None, "é", ""][:rows],
            "day": [datetime.date(2024, 1, 1)] * rows,
            "at": [datetime.datetime(2024, 1, 1, 5, tzinfo=datetime.UTC)] * rows,
            "price": [Decimal("1.25")] * rows,
            "x": draw.standard_normal((rows, 2, 3), dtype=np.float32),
            "z": [None if i == 1 else draw.standard_normal(2) for i in range(rows)],
            "image": draw.integers(0, 256, (rows, 4, 5, 3), dtype=np.uint8),
            "series": [np.arange(i, dtype=np.int16) for i in range(rows)],
        }


def test_all_values_come_back(tmp_path: Path) -> None:
    schema = Schema.from_yaml(SCHEMA)
    assert write_tensors(tmp_path / "t", schema, batches(), rows_per_group=3) == 8
    snapshot = open_table(tmp_path / "t").snapshot()
    assert (snapshot.format, snapshot.num_row_groups, len(snapshot.files)) == ("petastorm", 4, 2)
    found = list(open_table(tmp_path / "t").batches(4, schema))
    for batch, wrote in zip(found, batches(), strict=True):
        for name in ("id", "x", "image"):
            assert np.array_equal(batch[name], wrote[name])
        assert batch["z"].tolist() == [[-1, -1] if value is None else value.tolist() for value in wrote["z"]]
        assert batch["series"].tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 2]]
        assert batch["text"].tolist() == ["a", "none", "é", ""]
        assert batch["at"][0] == 1704085200 * 10**6 and batch["price"][0] == 1.25 and batch["day"][0] == 19723


def test_files_that_another_writer_left_are_described(tmp_path: Path) -> None:
    schema = Schema.from_yaml(SCHEMA)
    write_tensors(tmp_path / "t", schema, batches())
    (tmp_path / "t" / "_common_metadata").unlink()
    plain = open_table(tmp_path / "t").snapshot()
    assert plain.format == "parquet"
    describe_tensors(tmp_path / "t", schema)
    assert open_table(tmp_path / "t").snapshot().format == "petastorm"
    other = Schema.from_dict({"name": "t", "fields": {"gone": {"type": "int"}}})
    with pytest.raises(SchemaError, match="has no column 'gone'"):
        describe_tensors(tmp_path / "t", other)


def test_tensors_of_a_plain_table_are_fed_by_the_schema_alone(tmp_path: Path) -> None:
    schema = Schema.from_yaml(SCHEMA)
    write_tensors(tmp_path / "t", schema, batches())
    rows = pq.read_table(tmp_path / "t" / "part-00000.parquet", columns=["x"])
    pq.write_table(rows, tmp_path / "plain.parquet")
    field = {"type": "binary", "codec": "ndarray", "shape": [2, 3], "role": "feature"}
    right = Schema.from_dict({"name": "t", "fields": {"x": field}})
    (batch,) = open_table(tmp_path / "plain.parquet").batches(9, right)
    assert np.array_equal(batch["x"], next(batches())["x"])
    wrong = Schema.from_dict({"name": "t", "fields": {"x": {**field, "shape": [3, 2]}}})
    with pytest.raises(SchemaError, match=r"Column 'x' of .*plain\.parquet, row group 0, row 0: a tensor of shape"):
        list(open_table(tmp_path / "plain.parquet").batches(9, wrong))


def test_what_does_not_fit_is_refused_before_or_at_its_row(tmp_path: Path) -> None:
    schema = Schema.from_yaml(SCHEMA)
    (batch,) = batches(1)
    for change, said in (
        ({"x": np.zeros((4, 3, 2), np.float32)}, r"Column 'x', row 0: a tensor float32 \[3, 2\]"),
        ({"x": [np.zeros((2, 3), np.float32), None] * 2}, "Column 'x', row 1: a null, and it is not nullable"),
        ({"id": ["one"] * 4}, "Column 'id': a value does not fit bigint"),
        ({"id": np.arange(3)}, "different lengths"),
    ):
        with pytest.raises(SchemaError, match=said):
            write_tensors(tmp_path / "t", schema, [{**batch, **change}])
    del batch["day"]
    with pytest.raises(SchemaError, match="no values of 'day'"):
        write_tensors(tmp_path / "t", schema, [batch])
    assert not (tmp_path / "t").exists()
    write_tensors(tmp_path / "t", schema, batches())
    with pytest.raises(InputError, match="holds files already"):
        write_tensors(tmp_path / "t", schema, batches())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"type": "string", "codec": "ndarray"}, "codec ndarray needs type: binary"),
        ({"type": "binary", "codec": "ndarray", "dtype": "string"}, "no tensors of dtype 'string'"),
        ({"type": "binary", "codec": "ndarray", "preprocess": {"hash": {"buckets": 3}}}, "fed as it is"),
        ({"type": "binary", "codec": "png", "shape": [2], "pad": 300}, "pad: 300 is no value of dtype uint8"),
        ({"type": "binary", "codec": "png", "pad": 0}, "pad needs"),
        ({"type": "binary", "codec": "ndarray", "nulls": {"fill": "x"}}, "nulls.fill"),
    ],
)
def test_entries_that_fit_no_codec_are_refused(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        Schema.from_dict({"name": "t", "fields": {"x": spec}})


def test_a_field_of_a_schema_with_a_codec_and_no_shape_is_not_fed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([b"x"])}), tmp_path / "t.parquet")
    schema = Schema.from_dict({"name": "t", "fields": {"x": {"type": "binary", "codec": "ndarray", "role": "feature"}}})
    with pytest.raises(SchemaError, match=r"'x' is encoded .ndarray. without a shape"):
        next(open_table(tmp_path / "t.parquet").batches(1, schema))
