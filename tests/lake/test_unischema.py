"""A Unischema's pickle is read as plain data: what petastorm wrote arrives, and nothing in it is ever run."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.errors import SchemaError, TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import Schema
from dl_on_spark.lake.formats.petastorm import UNISCHEMA_KEY
from dl_on_spark.lake.restricted_pickle import Global, Instance, PickleError, dump, load
from dl_on_spark.lake.unischema import UnischemaField, read_unischema, write_unischema

TABLE = Path(__file__).parent / "petastorm" / "all_codecs"


def stored() -> bytes:
    found: bytes = pq.read_metadata(TABLE / "_common_metadata").metadata[UNISCHEMA_KEY]
    return found


def test_all_fields_that_petastorm_wrote_arrive() -> None:
    found = read_unischema(stored(), "t")
    assert found.name == "AllCodecs" and len(found.fields) == 17
    fields = {field.name: field for field in found.fields}
    assert fields["id"] == UnischemaField("id", "int64", (), "scalar", False)
    assert fields["price"] == UnischemaField("price", "decimal", (), "scalar", False)
    assert fields["plain"] == UnischemaField("plain", "int32", (), None, False)
    assert fields["sometimes"] == UnischemaField("sometimes", "float64", (2,), "ndarray", True)
    assert fields["points"] == UnischemaField("points", "float32", (None, 3), "compressed_ndarray", False)
    assert fields["deep"] == UnischemaField("deep", "uint16", (4, 4), "png", False)
    assert fields["photo"].codec == "jpeg" and fields["name"].dtype == "string" and fields["day"].dtype == "datetime64"


OLD = (  # protocol 0, as Python 2 and petastorm's package before its release wrote it; a named tuple as PySpark made it
    b"ccopy_reg\n_reconstructor\n(cav.ml.dataset_toolkit.unischema\nUnischema\nc__builtin__\nobject\nNtR"
    b"(dV_name\nVOld\nsV_fields\nccollections\nOrderedDict\n(tR"
    b"Vx\ncpyspark.serializers\n_restore\n(VUnischemaField\n(Vname\nVnumpy_dtype\nVshape\nVcodec\nVnullable\nt"
    b"(Vx\ncnumpy\nstring_\n(NI3\ntccopy_reg\n_reconstructor\n(cav.ml.dataset_toolkit.codecs\nNdarrayCodec\n"
    b"c__builtin__\nobject\nNtRI01\nttRssb."
)


def test_a_unischema_of_python_2_arrives_too() -> None:
    found = read_unischema(OLD, "t")
    assert found.name == "Old"
    assert found.fields == (UnischemaField("x", "binary", (None, 3), "ndarray", True),)


class Evil:
    """What unpickling would run, by the callable it names."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(("call", "name"), [(os.system, "posix.system"), (exec, "exec"), (eval, "eval")])
def test_a_malicious_pickle_is_refused_by_name_and_runs_nothing(
    tmp_path: Path, call: Any, name: str, protocol: int
) -> None:
    touched = tmp_path / "touched"
    code = f"touch {touched}" if call is os.system else f"__import__('pathlib').Path({str(touched)!r}).touch()"
    hidden = collections.OrderedDict(a=Evil(call, code))
    table = tmp_path / "t"
    table.mkdir()
    rows = pa.table({"x": [1]})
    pq.write_table(rows, table / "part-0.parquet")
    told = {UNISCHEMA_KEY: pickle.dumps(hidden, protocol)}
    pq.write_metadata(rows.schema.with_metadata(told), table / "_common_metadata")
    with pytest.raises(TableError, match=rf"it names [\w.]*{name}. Nothing of it was run") as caught:
        open_table(table).snapshot()
    assert str(table) in str(caught.value) and "format='parquet'" in str(caught.value)
    assert not touched.exists()
    assert open_table(table, format="parquet").snapshot().rows == 1
    pickle.loads(told[UNISCHEMA_KEY])  # it would have run: petastorm's own reader lets builtins in
    assert touched.exists()


@pytest.mark.parametrize("name", ["petastorm.codecs.MyCodec", "numpy.load", "pyspark.sql.types._parse_datatype_string"])
def test_names_beside_those_of_a_unischema_are_refused_even_in_its_packages(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(TableError, match=name):
        read_unischema(dump(Instance(Global(module, attribute), ())), "t")


def test_a_dotted_name_is_no_way_around() -> None:
    sneaky = b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93."
    with pytest.raises(TableError, match=r"it names numpy\.dtype\.__class__"):
        read_unischema(sneaky, "t")


@given(st.data())
def test_a_damaged_pickle_is_an_error_and_nothing_else(data: st.DataObject) -> None:
    broken = bytearray(stored())
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TableError):
        read_unischema(bytes(broken[: data.draw(st.integers(0, len(broken)))]), "t")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.text(),
    lambda inner: (
        st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.builds(Instance, st.just(Global("a.b", "C")), st.lists(inner, max_size=2).map(tuple), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert load(dump(value), lambda _: True) == value


def test_a_pickle_of_plain_values_of_any_protocol_is_read() -> None:
    value = {"a": (1, -7, 2**40, 1.5, "é", b"x", None, True, [1, [2]]), "b": {"c": ()}}
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):  # bytes take a call in older ones
        assert load(pickle.dumps(value, protocol), lambda _: True) == value
    with pytest.raises(PickleError, match="opcode"):
        load(b"\x80\x02\x82\x01.", lambda _: True)  # an extension code


def test_ours_is_written_as_petastorm_would_write_it() -> None:
    fields = {
        "id": {"type": "bigint", "nullable": False},
        "price": {"type": "decimal(8,2)"},
        "x": {"type": "binary", "codec": "ndarray", "dtype": "float64", "shape": [2, 3]},
        "p": {"type": "binary", "codec": "jpeg", "shape": [4, 4, 3], "pad": 0},
    }
    found = read_unischema(write_unischema(Schema.from_dict({"name": "ours", "fields": fields})), "t")
    assert found.name == "ours"
    assert found.fields == (
        UnischemaField("id", "int64", (), "scalar", False),
        UnischemaField("price", "decimal", (), "scalar", True),
        UnischemaField("x", "float64", (2, 3), "ndarray", True),
        UnischemaField("p", "uint8", (None, None, None), "jpeg", True),
    )
    nested = Schema.from_dict({"name": "ours", "fields": {"x": {"type": "array<int>"}}})
    with pytest.raises(SchemaError, match="'x' of type array<int> has no codec in petastorm"):
        write_unischema(nested)


def test_tensors_of_truth_values_have_a_name_that_every_numpy_knows() -> None:
    """NumPy 1.24 to 1.26, which petastorm runs on, have no `numpy.bool`."""
    fields = {"x": {"type": "binary", "codec": "ndarray", "dtype": "bool", "shape": [2]}, "y": {"type": "boolean"}}
    written = write_unischema(Schema.from_dict({"name": "ours", "fields": fields}))
    named = {argument for _, argument, _ in pickletools.genops(written)}
    assert "numpy bool_" in named
    assert "numpy bool" not in named
    assert {field.dtype for field in read_unischema(written, "t").fields} == {"bool"}
