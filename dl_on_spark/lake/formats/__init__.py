"""Table formats: each turns an address into the same list of Parquet files and row groups.

A new format is one module with `recognizes(place) -> bool` and `resolve(place, version, predicate, spark) -> Content`,
and one line here. The first format that recognizes an address reads it.
"""

from __future__ import annotations

from types import ModuleType

from dl_on_spark.lake.formats import delta, iceberg, parquet, petastorm

FORMATS: dict[str, ModuleType] = {
    "delta": delta,
    "iceberg": iceberg,
    "petastorm": petastorm,
    "parquet": parquet,
}
