"""Fields of structs by dotted name: read alone, filtered, checked, with the nulls of the structs around them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import RowGroupDecoder, Schema
from dl_on_spark.lake.nested import names_of, path_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = [
    {"id": 1, "place": {"x": 1.5, "at": {"name": "a", "floor": 3}}, "a.b": 7},
    {"id": 2, "place": {"x": None, "at": {"name": "b", "floor": None}}, "a.b": 8},
    {"id": 3, "place": {"x": 2.5, "at": None}, "a.b": 9},
    {"id": 4, "place": None, "a.b": 10},
]
KIND = pa.struct(
    [("x", pa.float64()), ("at", pa.struct([("name", pa.string()), ("floor", pa.int32())]))],
)
TABLE = pa.schema([("id", pa.int64()), ("place", KIND), ("a.b", pa.int64())])


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS, schema=TABLE), tmp_path / "a.parquet", row_group_size=2)
    return tmp_path


def test_names_are_found_from_the_top_and_a_dot_of_a_name_comes_first() -> None:
    assert names_of(TABLE) == ["id", "place", "place.x", "place.at", "place.at.name", "place.at.floor", "a.b"]
    assert path_of(TABLE, "place.at.floor") == ("place", "at", "floor")
    assert path_of(TABLE, "a.b") == ("a.b",)
    assert path_of(TABLE, "place.y") is None and path_of(TABLE, "id.x") is None
    both = pa.schema([("place.x", pa.int8()), ("place", KIND)])
    assert path_of(both, "place.x") == ("place.x",)


def test_values_are_those_of_spark(spark: SparkSession, uri: Path) -> None:
    names = ["place.x", "place.at.name", "place.at.floor"]
    found = spark.read.parquet(str(uri)).selectExpr("id", *(f"{name} as `{name}`" for name in names)).orderBy("id")
    expected = [row.asDict() for row in found.collect()]
    with RowGroupDecoder(open_table(uri).snapshot(), ["id", *names], dictionary_text=True) as decoder:
        ours = pa.concat_tables([decoder.decode(0), decoder.decode(1)]).to_pylist()
    assert ours == expected


def test_a_field_is_read_without_its_siblings(uri: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, i, columns, **options: asked.append(columns) or read(self, i, columns=columns, **options),
    )
    with RowGroupDecoder(open_table(uri).select(["place.x"]).snapshot()) as decoder:
        assert decoder.decode(0).to_pydict() == {"place.x": [1.5, None]}
    assert asked == [["place.x"]]


@pytest.mark.parametrize(
    ("filter", "ids"),
    [
        ("place.x > 1", [1, 3]),
        ("place.at.floor = 3", [1]),
        ("place.at.name is null", [3, 4]),
        ("PLACE.X is null and `a.b` < 9", [2]),
    ],
)
def test_filters_reach_into_structs_as_sparks_do(spark: SparkSession, uri: Path, filter: str, ids: list[int]) -> None:
    assert [row.id for row in spark.read.parquet(str(uri)).where(filter).orderBy("id").collect()] == ids
    snapshot = open_table(uri).where(filter).snapshot()
    with RowGroupDecoder(snapshot, ["id"]) as decoder:
        found = [row for i in range(snapshot.num_row_groups) for row in decoder.decode(i).column("id").to_pylist()]
    assert found == ids and snapshot.rows == len(ids)


def test_batches_hold_fields_under_their_dotted_names(uri: Path) -> None:
    fields = {
        "place.x": {"type": "double", "role": "feature", "nulls": {"fill": 0}},
        "place.at.floor": {"type": "int", "role": "feature", "nulls": "indicator"},
    }
    (batch,) = open_table(uri).batches(10, Schema.from_dict({"name": "t", "fields": fields}))
    assert batch["place.x"].tolist() == [1.5, 0, 2.5, 0]
    assert batch["place.at.floor"].tolist() == [3, 0, 0, 0]
    assert batch["place.at.floor_is_null"].tolist() == [0, 1, 1, 1]


def test_unknown_names_are_told_with_the_nearest(uri: Path) -> None:
    with pytest.raises(TableError, match=r"no column 'place\.at\.flor'") as caught:
        open_table(uri).select(["place.at.flor"]).snapshot()
    assert "place.at.floor" in (caught.value.fix or "")
    with pytest.raises(TableError, match=r"no column 'place\.z'"):
        open_table(uri).where("place.z = 1").snapshot()
    schema = Schema.from_dict({"name": "t", "fields": {"place.y": {"type": "double", "role": "feature"}}})
    with pytest.raises(SchemaError, match=r"no column 'place\.y'") as refused:
        list(open_table(uri).batches(10, schema))
    assert "place.x" in (refused.value.fix or "")
