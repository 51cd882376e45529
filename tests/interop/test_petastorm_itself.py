"""petastorm's own writer and readers against ours, on the same files. `make interop` runs this where they work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import Schema, write_tensors
from dl_on_spark.lake.unischema import read_unischema, write_unischema
from tests.interop import tables
from tests.lake.test_petastorm import RECORDED, TABLE
from tests.lake.test_petastorm import VARIABLE as _VARIABLE
from tests.lake.test_tensor_writes import SCHEMA, batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("petastorm", reason="petastorm is not installed: see `make interop`")
pytestmark = [
    pytest.mark.skipif(int(pa.__version__.split(".")[0]) > 14, reason="petastorm's readers need pyarrow 14"),
    pytest.mark.filterwarnings("ignore"),  # of names that pyarrow 14 still has
]


@pytest.fixture(scope="module")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("petastorm") / "t"
    tables.write(spark, folder)
    return folder


def test_what_petastorm_writes_now_is_read_as_petastorm_reads_it(written: Path) -> None:
    theirs = tables.recorded(tables.read(written))
    fixed = ["id", "small", "ratio", "name", "plain", "matrix", "cube", "picture", "deep", "photo", "grey", "code"]
    (ours,) = open_table(written).select(fixed).batches(100)
    order = np.argsort(ours["id"])
    for name in fixed:
        expected = theirs[name]
        found = ours[name][order]
        assert np.array_equal(found, expected.astype(object) if expected.dtype.kind == "U" else expected), name
    variable = Schema.from_dict({"name": "t", "fields": _VARIABLE})
    (ours,) = open_table(written).batches(100, variable)
    for row, i in enumerate(ours["id"].tolist()):
        assert np.array_equal(ours["series"][row, :i], theirs[f"series.{i}"])
        assert np.array_equal(ours["points"][row, : i + 1], theirs[f"points.{i}"])


def test_the_recorded_values_of_the_fixture_are_those_that_petastorm_reads_today(written: Path) -> None:
    for folder in (TABLE, written):
        found = tables.recorded(tables.read(folder))
        assert set(found) == set(RECORDED)
        for name, value in found.items():
            assert np.array_equal(value, RECORDED[name]) and value.dtype == RECORDED[name].dtype, name


def test_what_we_write_petastorm_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", Schema.from_yaml(SCHEMA), batches(), rows_per_group=3)
    found = tables.read(tmp_path / "t")
    assert len(found) == 8
    for batch in batches():
        for row, i in enumerate(batch["id"].tolist()):
            theirs = found[i]
            for name in ("x", "z", "image", "series"):
                ours = batch[name][row]
                assert (theirs[name] is None) == (ours is None)
                assert ours is None or (theirs[name].dtype == ours.dtype and np.array_equal(theirs[name], ours))
            assert theirs["text"] == batch["text"][row] and theirs["price"] == batch["price"][row]
            assert str(theirs["day"]) == "2024-01-01" and str(theirs["at"]).startswith("2024-01-01T05:00")


def test_our_unischema_is_the_one_that_petastorm_would_make() -> None:
    from petastorm.etl.legacy import depickle_legacy_package_name_compatible

    schema = Schema.from_yaml(SCHEMA)
    ours, theirs = depickle_legacy_package_name_compatible(write_unischema(schema)), schema.to_unischema()
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert str(ours.fields[name].codec) == str(field.codec)
        assert ours.fields[name] == field


def test_every_protocol_of_petastorms_pickle_is_read() -> None:
    import pickle

    found = {read_unischema(pickle.dumps(tables.unischema(), protocol), "t") for protocol in range(6)}
    assert len(found) == 1 and len(found.pop().fields) == 17


def test_petastorms_batch_reader_reads_our_scalars(tmp_path: Path) -> None:
    from petastorm import make_batch_reader

    write_tensors(tmp_path / "t", Schema.from_yaml(SCHEMA), batches())
    with make_batch_reader(f"file://{tmp_path / 't'}", reader_pool_type="dummy", schema_fields=["id"]) as reader:
        assert sorted(i for batch in reader for i in batch.id.tolist()) == list(range(8))
