"""Tables on an S3 server are the same tables: values, fingerprints, formats; a file that goes is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyarrow import fs
from pyiceberg.catalog.sql import SqlCatalog

from dl_on_spark.errors import TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import RowGroupDecoder
from tests.object_store import s3_server

ROWS = pa.table({"id": np.arange(500), "x": np.arange(500) / 2, "word": [f"w{i % 5}" for i in range(500)]})


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as uri:
        yield uri


def ids(uri: str, where: str = "id >= 0") -> list[int]:
    return sorted(i for batch in open_table(uri).where(where).batches(64, seed=1) for i in batch["id"].tolist())


def test_a_parquet_table_is_the_same_on_both_sides(s3: str, tmp_path: Path) -> None:
    for day in ("2024-01-01", "2024-01-02"):
        (tmp_path / f"date={day}").mkdir()
        pq.write_table(ROWS, tmp_path / f"date={day}" / "a b.parquet", row_group_size=64)
    store, path = fs.FileSystem.from_uri(f"{s3}/plain")
    fs.copy_files(str(tmp_path), path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=store)
    where = "date = '2024-01-02' and id between 10 and 300"
    here, there = (open_table(uri).where(where).snapshot() for uri in (tmp_path, f"{s3}/plain"))
    assert here.fingerprint == there.fingerprint
    assert ids(f"{s3}/plain", where) == list(range(10, 301))
    store.delete_file(f"{path}/date=2024-01-02/a b.parquet")
    with RowGroupDecoder(there) as decoder, pytest.raises(TableError, match=r"a b\.parquet vanished since"):
        decoder.decode(0)


def test_a_delta_table_is_read_in_place(s3: str) -> None:
    options = {"allow_http": "true"}
    write_deltalake(f"{s3}/delta", ROWS, partition_by=["word"], storage_options=options)
    write_deltalake(f"{s3}/delta", ROWS.slice(0, 10), mode="append", storage_options=options)
    assert ids(f"{s3}/delta", "word = 'w3'") == sorted([*range(3, 500, 5), 3, 8])
    assert open_table(f"{s3}/delta", version=0).snapshot().rows == 500


def test_an_iceberg_table_is_read_in_place(s3: str, tmp_path: Path) -> None:
    catalog = SqlCatalog(
        "s3",
        uri=f"sqlite:///{tmp_path}/catalog.db",
        warehouse=f"{s3}/warehouse",
        **{"s3.endpoint": os.environ["AWS_ENDPOINT_URL"]},
    )
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", schema=ROWS.schema)
    table.append(ROWS)
    assert ids(table.location(), "id > 490 or word = 'w0'") == sorted({*range(491, 500), *range(0, 500, 5)})
    assert ids(table.metadata_location.replace("s3://", "s3a://"), "id < 3") == [0, 1, 2]
