"""Tables that petastorm itself writes, and what its own readers give of them. Runs in the legacy environment."""

from __future__ import annotations

import argparse
import datetime
import decimal
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 4


def unischema() -> Any:
    """Every codec, fixed and variable shapes, nullable tensors, narrow scalars, text, dates."""
    from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
    from petastorm.unischema import Unischema, UnischemaField
    from pyspark.sql import types as t

    return Unischema(
        "AllCodecs",
        [
            UnischemaField("id", np.int64, (), ScalarCodec(t.LongType()), False),
            UnischemaField("small", np.uint8, (), ScalarCodec(t.IntegerType()), False),
            UnischemaField("ratio", np.float32, (), ScalarCodec(t.FloatType()), False),
            UnischemaField("name", np.str_, (), ScalarCodec(t.StringType()), False),
            UnischemaField("price", decimal.Decimal, (), ScalarCodec(t.DecimalType(8, 2)), False),
            UnischemaField("day", np.datetime64, (), ScalarCodec(t.DateType()), False),
            UnischemaField("plain", np.int32, (), None, False),
            UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
            UnischemaField("sometimes", np.float64, (2,), NdarrayCodec(), True),
            UnischemaField("series", np.int16, (None,), NdarrayCodec(), False),
            UnischemaField("points", np.float32, (None, 3), CompressedNdarrayCodec(), False),
            UnischemaField("cube", np.uint16, (2, 2, 2), CompressedNdarrayCodec(), False),
            UnischemaField("picture", np.uint8, (6, 5, 3), CompressedImageCodec("png"), False),
            UnischemaField("deep", np.uint16, (4, 4), CompressedImageCodec("png"), False),
            UnischemaField("photo", np.uint8, (16, 16, 3), CompressedImageCodec("jpeg", 90), False),
            UnischemaField("grey", np.uint8, (8, 8), CompressedImageCodec("jpeg"), False),
            UnischemaField("code", np.str_, (), ScalarCodec(t.StringType()), False),
        ],
    )


def rows() -> Iterator[dict[str, Any]]:
    """The same rows each time."""
    draw = np.random.default_rng(7)
    for i in range(ROWS):
        yield {
            "id": i,
            "small": np.uint8(200 + i),
            "ratio": np.float32(i / 7),
            "name": f"name {i} é",
            "price": decimal.Decimal(i) + decimal.Decimal("0.25"),
            "day": datetime.date(2024, 2, 27) + datetime.timedelta(days=i),
            "plain": -i,
            "matrix": draw.standard_normal((2, 3), dtype=np.float32),
            "sometimes": None if i % 3 == 1 else draw.standard_normal(2),
            "series": np.arange(i, dtype=np.int16),
            "points": draw.standard_normal((i + 1, 3), dtype=np.float32),
            "cube": draw.integers(0, 60_000, (2, 2, 2), dtype=np.uint16),
            "picture": draw.integers(0, 256, (6, 5, 3), dtype=np.uint8),
            "deep": draw.integers(0, 60_000, (4, 4), dtype=np.uint16),
            "photo": np.kron(draw.integers(0, 256, (4, 4, 3)), np.ones((4, 4, 1))).astype(np.uint8),
            "grey": np.arange(64, dtype=np.uint8).reshape(8, 8) + np.uint8(i),
            "code": f"c{i % 2}",
        }


def write(spark: SparkSession, folder: Path) -> None:
    """Write the table as petastorm's documentation says, partitioned by ``code``."""
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import dict_to_spark_row

    schema, url = unischema(), f"file://{folder}"
    with materialize_dataset(spark, url, schema, 1):
        encoded = [dict_to_spark_row(schema, row) for row in rows()]
        frame = spark.createDataFrame(encoded, schema.as_spark_schema())
        frame.coalesce(1).write.partitionBy("code").mode("overwrite").parquet(url)


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """What petastorm's `make_reader` gives, by ``id``."""
    from petastorm import make_reader

    with make_reader(f"file://{folder}", reader_pool_type="dummy", num_epochs=1, shuffle_row_groups=False) as reader:
        return {int(row.id): row._asdict() for row in reader}


def recorded(found: dict[int, dict[str, Any]]) -> dict[str, np.ndarray]:
    """The values by field, one array where all rows have one shape, else one a row: ``field.id``."""
    arrays: dict[str, np.ndarray] = {}
    for name in found[0]:
        values = {i: row[name] for i, row in sorted(found.items()) if row[name] is not None}
        plain = {i: str(v) if isinstance(v, decimal.Decimal | datetime.date) else v for i, v in values.items()}
        if len(plain) == len(found) and len({np.shape(v) for v in plain.values()}) == 1:
            arrays[name] = np.stack(list(plain.values()))
        else:
            arrays.update({f"{name}.{i}": value for i, value in plain.items()})
    return arrays


def main() -> None:
    """Write the fixture that the ordinary tests read, with the values that petastorm's own reader gives."""
    from pyspark.sql import SparkSession

    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("folder", type=Path)
    folder = options.parse_args().folder.absolute()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
    write(spark, folder / "all_codecs")
    found = read(folder / "all_codecs")
    np.savez_compressed(folder / "all_codecs.npz", **recorded(found))
    for path in (folder / "all_codecs").rglob("*"):
        if path.name == "_SUCCESS" or path.suffix == ".crc":
            path.unlink()


if __name__ == "__main__":
    main()
