"""Tables that petastorm wrote, read in place without it: the values are those that its own reader gave."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.jobs.inspect_table import inspect, show
from dl_on_spark.lake import Schema, Snapshot

# Written by tests/interop/tables.py in the legacy environment; the .npz holds what petastorm's make_reader gave.
TABLE = Path(__file__).parent / "petastorm" / "all_codecs"
RECORDED = np.load(TABLE.with_suffix(".npz"))
FIXED = ["id", "small", "ratio", "name", "price", "day", "plain", "matrix", "cube", "picture", "deep", "photo", "grey"]
VARIABLE = {
    "id": {"type": "bigint", "role": "feature"},
    "series": {"type": "binary", "codec": "ndarray", "dtype": "int16", "shape": [4], "pad": -1, "role": "feature"},
    "points": {"type": "binary", "codec": "compressed_ndarray", "shape": [5, 3], "pad": 9, "role": "feature"},
    "sometimes": {
        **{"type": "binary", "codec": "ndarray", "dtype": "float64", "shape": [2]},
        **{"nulls": "indicator", "role": "feature"},
    },
}


def read(columns: list[str] | None = None, schema: Schema | None = None) -> dict[str, np.ndarray]:
    """All rows in the order of ``id``."""
    table = open_table(TABLE) if columns is None else open_table(TABLE).select(columns)
    batches = list(table.batches(3, schema, seed=1))
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(rows["id"])
    return {name: values[order] for name, values in rows.items()}


def schema_of(fields: dict[str, dict[str, Any]]) -> Schema:
    return Schema.from_dict({"name": "t", "fields": fields})


def test_tensors_images_and_scalars_of_every_codec_are_what_petastorm_reads() -> None:
    found = read([*FIXED, "code"])
    for name in (*FIXED, "code"):
        expected = RECORDED[name]
        if name == "price":
            expected = expected.astype(float)
        elif name == "day":
            expected = expected.astype("datetime64[D]").astype(np.int32)
        elif expected.dtype.kind == "U":
            expected = expected.astype(object)
        assert found[name].dtype == expected.dtype, name
        assert np.array_equal(found[name], expected), name


def test_tensors_of_several_sizes_are_padded_and_absent_ones_follow_the_policy() -> None:
    found = read(schema=schema_of(VARIABLE))
    for i in range(4):
        series, points = RECORDED[f"series.{i}"], RECORDED[f"points.{i}"]
        assert found["series"][i].tolist() == [*series, *[-1] * (4 - len(series))]
        assert np.array_equal(found["points"][i, : len(points)], points)
        assert (found["points"][i, len(points) :] == 9).all()
        there = f"sometimes.{i}" in RECORDED
        assert np.array_equal(found["sometimes"][i], RECORDED[f"sometimes.{i}"] if there else [0, 0])
        assert (found["sometimes_is_null"][i] == (0 if there else 1)).all()


def test_petastorm_is_neither_imported_nor_needed() -> None:
    code = (
        "import sys; sys.modules['petastorm'] = None\n"
        "from dl_on_spark.input_pipeline import open_table\n"
        f"(batch,) = open_table({str(TABLE)!r}).select(['id', 'matrix']).batches(9)\n"
        "assert batch['matrix'].shape == (4, 2, 3) and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


def test_a_snapshot_carries_its_tensors_and_columns_through_json() -> None:
    snapshot = open_table(TABLE).select(["matrix", "id"]).snapshot()
    again = Snapshot.from_json(snapshot.to_json())
    assert snapshot.format == "petastorm" and again.schema.equals(snapshot.schema, check_metadata=True)
    assert again.fingerprint == snapshot.fingerprint


def test_filters_prune_by_partition_and_by_scalars() -> None:
    table = open_table(TABLE).where("code = 'c1' and small > 201").select(["id", "matrix"])
    (batch,) = table.batches(9)
    assert batch["id"].tolist() == [3] and np.array_equal(batch["matrix"][0], RECORDED["matrix"][3])
    with pytest.raises(TableError, match="matrix"):
        open_table(TABLE).where("matrix = 1").snapshot()


def test_inspect_shows_codec_type_and_shape_and_what_the_others_need(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(str(TABLE))
    columns = {column.name: column for column in found.columns}
    assert found.format == "petastorm"
    assert (columns["matrix"].type, columns["matrix"].fed) == ("ndarray float32 [2, 3]", "float32 [2, 3]")
    assert (columns["photo"].type, columns["photo"].fed) == ("jpeg uint8 [16, 16, 3]", "uint8 [16, 16, 3]")
    assert (columns["small"].type, columns["small"].fed) == ("int32", "uint8 []")
    assert columns["points"].type == "compressed_ndarray float32 [any, 3]" and columns["points"].fed == ""
    assert "codec: compressed_ndarray, dtype: float32, its shape, and pad" in columns["points"].needs
    from rich.console import Console

    show(found, Console(width=160))
    assert "compressed_ndarray float32 [any, 3]" in capsys.readouterr().out


def test_without_a_schema_variable_tensors_are_refused_before_anything_is_read() -> None:
    with pytest.raises(SchemaError, match=r"'series' \(ndarray int16 \[any\]\), 'points' .* cannot become tensors"):
        next(open_table(TABLE).batches(2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": "compressed_ndarray"}, "asks for codec compressed_ndarray"),
        ({"dtype": "float64"}, "asks for dtype float64"),
        ({"shape": [3, 2]}, r"asks for shape \[3, 2\]"),
        ({"shape": [6]}, r"asks for shape \[6\]"),
        ({"shape": [1, 3], "pad": 0}, r"asks for shape \[1, 3\]"),
    ],
)
def test_a_schema_that_asks_for_other_tensors_is_refused_before_launch(change: dict[str, Any], said: str) -> None:
    field = {"type": "binary", "codec": "ndarray", "dtype": "float32", "shape": [2, 3], "role": "feature", **change}
    with pytest.raises(SchemaError, match=rf"column 'matrix' holds ndarray float32 \[2, 3\]; the schema {said}"):
        next(open_table(TABLE).batches(2, schema_of({"matrix": field})))


def copy(tmp_path: Path) -> Path:
    shutil.copytree(TABLE, tmp_path / "t")
    return tmp_path / "t"


def test_a_damaged_cell_is_named_by_column_file_and_row(tmp_path: Path) -> None:
    table = copy(tmp_path)
    (file,) = (table / "code=c1").glob("*.parquet")
    rows = pq.read_table(file, partitioning=None)
    cells = rows.column("matrix").to_pylist()
    cells[1] = cells[1][:-1]
    at = rows.schema.get_field_index("matrix")
    pq.write_table(rows.set_column(at, rows.schema.field(at), pa.array(cells, pa.binary())), file)
    said = rf"Column 'matrix' of code=c1/{file.name}, row group 0, row 1: a truncated \.npy"
    with pytest.raises(SchemaError, match=said):
        list(open_table(table).select(["id", "matrix"]).batches(2))
    said = r"row group 0 \(without rows that are filtered out\), row 0: a truncated"
    with pytest.raises(SchemaError, match=said):
        list(open_table(table).where("id = 3").select(["id", "matrix"]).batches(2))


def test_metadata_that_does_not_fit_the_files_is_refused(tmp_path: Path) -> None:
    table = copy(tmp_path)
    for file in table.rglob("*.parquet"):
        pq.write_table(pq.read_table(file, partitioning=None).drop_columns(["matrix"]), file)
    with pytest.raises(TableError, match="Unischema 'AllCodecs' has a field 'matrix', and the files have no"):
        open_table(table).snapshot()
    (table / "_common_metadata").write_bytes(b"PAR1 is not all")
    with pytest.raises(TableError, match="_common_metadata cannot be read"):
        open_table(table).snapshot()
    (table / "_common_metadata").unlink()
    assert open_table(table).snapshot().format == "parquet"
    with pytest.raises(TableError, match="there is no petastorm table"):
        open_table(table, format="petastorm").snapshot()


def test_a_common_metadata_of_another_writer_changes_nothing(tmp_path: Path) -> None:
    rows = pa.table({"x": [1, 2]})
    pq.write_table(rows, tmp_path / "part-0.parquet")
    pq.write_metadata(rows.schema, tmp_path / "_common_metadata")
    assert open_table(tmp_path).snapshot().format == "parquet"
