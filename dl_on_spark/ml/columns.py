"""A DataFrame's columns as the schema that training reads them by."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import SchemaError
from dl_on_spark.lake import Schema
from dl_on_spark.lake.ddl import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def schema_of(rows: DataFrame, features: Sequence[str], label: str, weight: str | None) -> Schema:
    """Features, label and weight with the types that the DataFrame has; a null in any is refused.

    Fractions are fed to the model as float32. Vectors and arrays have the length that the column's ML attributes
    name, or else that of the first row. Raises `SchemaError` for a column that is missing or cannot be fed.
    """
    fields = {name: {**_field(rows, name, fed=True), "role": "feature"} for name in features}
    for name, role in ((label, "label"), (weight, "weight")):
        if name is None:
            continue
        if name in fields:
            raise SchemaError(f"column {name!r} is both a feature and the {role}.", fix="Name two columns.")
        fields[name] = {**_field(rows, name, fed=False), "role": role}
    return Schema.from_dict({"name": "dataframe", "fields": fields}, "the DataFrame")


def check_column(rows: DataFrame, name: str) -> None:
    """Raise `SchemaError` unless the DataFrame has the column."""
    if name not in rows.columns:
        near = difflib.get_close_matches(name, rows.columns, n=1)
        raise SchemaError(
            f"the DataFrame has no column {name!r}.",
            fix=f"Did you mean {near[0]!r}?" if near else f"Columns: {', '.join(rows.columns)}.",
        )


def _field(rows: DataFrame, name: str, *, fed: bool) -> dict[str, Any]:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import ArrayType, DecimalType, DoubleType

    check_column(rows, name)
    column = rows.schema[name]
    kind = column.dataType
    if isinstance(kind, VectorUDT):
        size = column.metadata.get("ml_attr", {}).get("num_attrs")
        return {"type": "vector", "dtype": "float32", "shape": [int(size or _first_length(rows, name))]}
    found: dict[str, Any] = {"type": kind.simpleString()}
    if isinstance(kind, ArrayType):
        found["shape"] = [_first_length(rows, name)]
        kind = kind.elementType
    if fed and isinstance(kind, (DoubleType, DecimalType)):
        found["dtype"] = "float32"
    return found


def _first_length(rows: DataFrame, name: str) -> int:
    first = rows.select(quoted(name)).where(f"{quoted(name)} is not null").head(1)
    if not first or not len(first[0][0]):
        raise SchemaError(f"column {name!r} has no value.", fix="Give it values, or remove it from the features.")
    return len(first[0][0])
