"""Statistics that preprocessing needs, from one Spark pass over a pinned snapshot.

Each task reads its row groups with the decoder that training uses (same files, same filter) and returns
one small partial per field; the driver merges them. Means and deviations are merged in float64 by the
pairwise rule of Chan, Golub and LeVeque (1979); vocabularies are exact; quantiles come from evenly spaced
order statistics of each row group, at most 1/1,000 off.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dl_on_spark.errors import SchemaError
from dl_on_spark.lake import ddl
from dl_on_spark.lake.row_groups import RowGroupDecoder
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.snapshot import Snapshot
from dl_on_spark.lake.spark_session import default_parallelism

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SUMMARY = 1_001


@dataclass(frozen=True)
class FieldStatistics:
    """One column: values and nulls (NaN among them) counted; ``std`` is the population's. What does not apply is None.

    ``vocabulary``: most frequent first, ties by value. ``boundaries``: inner quantile boundaries.
    """

    count: int
    nulls: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    vocabulary: tuple[Any, ...] | None = None
    boundaries: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Statistics:
    """Statistics of the fields of a schema over the rows of one snapshot.

    ``label_means``: mean of each numeric label, the constant rate that a model must beat.
    ``refused_nulls``: nulls of each flat feature or label that has some and whose schema refuses them.
    """

    rows: int
    fingerprint: str
    fields: dict[str, FieldStatistics]
    label_means: dict[str, float] = field(default_factory=dict)
    refused_nulls: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """All of the statistics as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Statistics:
        """The statistics that `to_json` wrote."""
        data = json.loads(text)
        fields = {name: _field_from_json(found) for name, found in data["fields"].items()}
        return cls(data["rows"], data["fingerprint"], fields, data["label_means"], data.get("refused_nulls", {}))


def compute_statistics(spark: SparkSession, snapshot: Snapshot, schema: Schema) -> Statistics:
    """Statistics of the fields that preprocessing or a baseline needs, in one Spark job.

    Raises `SchemaError` where a field has no value at all to learn from.
    """
    needed = [f for f in schema.features if f.step in {"standardize", "vocabulary"} or "quantiles" in f.options]
    labels = [f for f in schema.labels if _is_number(f.arrow_type) and not f.shape]
    wanted = [*needed, *labels]
    wanted += [f for f in (*schema.features, *schema.labels) if f not in wanted and _is_counted(f)]
    if not wanted:
        return Statistics(snapshot.rows, snapshot.fingerprint, {})
    schema.check(snapshot.schema, snapshot.uri, [f.name for f in wanted])
    groups = snapshot.num_row_groups
    tasks = max(1, min(groups, 2 * default_parallelism(spark)))
    # Spark itself broadcasts a function that has become large with what it carries.
    shipped = (snapshot.to_json(), schema.to_dict(), [f.name for f in wanted])
    partials = (
        spark.range(0, tasks, 1, tasks)
        .mapInArrow(lambda batches: _task(batches, shipped, tasks), "partial string")
        .collect()
    )
    merged = merge([json.loads(row.partial) for row in partials])
    fields = {f.name: _finish(f, merged[f.name]) for f in needed}
    means = {f.name: merged[f.name]["mean"] for f in labels if merged[f.name]["count"]}
    refused = {f.name: merged[f.name]["nulls"] for f in wanted if f.nulls == "refuse" and merged[f.name]["nulls"]}
    return Statistics(snapshot.rows, snapshot.fingerprint, fields, means, refused)


def partial_of(column: pa.ChunkedArray, spec: Field) -> dict[str, Any]:
    """Mergeable summary of one column of some rows, as plain values."""
    while ddl.element_type(column.type) != column.type:  # one mean, or one vocabulary, for all places of a list
        column = pc.list_flatten(column)
    values = column.drop_null()
    if pa.types.is_floating(values.type):
        wide = values.cast(pa.float32()) if pa.types.is_float16(values.type) else values  # no kernels for halfs
        values = wide.filter(pc.invert(pc.is_nan(wide)))
    found: dict[str, Any] = {"count": len(values), "nulls": len(column) - len(values)}
    if spec.step == "vocabulary":
        counts = pc.value_counts(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)
        found["words"] = [[item["values"], item["counts"]] for item in counts.to_pylist()]
        return found
    if not _is_measured(spec):
        return found
    numbers = as_numbers(values)
    found.update(count=int(numbers.size), nulls=len(column) - int(numbers.size))
    found.update(mean=0.0, squares=0.0, min=None, max=None)
    if numbers.size:
        mean = float(numbers.mean())
        found.update(mean=mean, squares=float(np.square(numbers - mean).sum()))
        found.update(min=float(numbers.min()), max=float(numbers.max()))
    if "quantiles" in spec.options and numbers.size:
        places = np.linspace(0, numbers.size - 1, min(_SUMMARY, numbers.size))
        points = np.sort(numbers)[np.round(places).astype(np.int64)]
        found["points"] = [[float(point), numbers.size / len(points)] for point in points]
    return found


def merge(partials: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One summary per field out of the partials of many tasks, in any order and grouping."""
    merged: dict[str, dict[str, Any]] = {}
    for partial in partials:
        for name, new in partial.items():
            merged[name] = new if name not in merged else _merge_two(merged[name], new)
    return merged


def _merge_two(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    count = a["count"] + b["count"]
    found: dict[str, Any] = {"count": count, "nulls": a["nulls"] + b["nulls"]}
    if "words" in a:
        words: Counter[Any] = Counter()
        for word, times in (*a["words"], *b["words"]):
            words[word] += times
        found["words"] = [[word, times] for word, times in words.items()]
        return found
    if "mean" not in a:
        return found
    difference = b["mean"] - a["mean"]
    share = b["count"] / count if count else 0.0
    found["mean"] = a["mean"] + difference * share
    found["squares"] = a["squares"] + b["squares"] + difference * difference * a["count"] * share
    found["min"] = min((v for v in (a["min"], b["min"]) if v is not None), default=None)
    found["max"] = max((v for v in (a["max"], b["max"]) if v is not None), default=None)
    if "points" in a or "points" in b:
        found["points"] = [*a.get("points", []), *b.get("points", [])]
    return found


def _task(
    batches: Iterator[pa.RecordBatch], shipped: tuple[str, dict[str, Any], list[str]], tasks: int
) -> Iterator[pa.RecordBatch]:
    """The partial of every row group whose number is this task's, modulo the tasks."""
    snapshot_json, schema_dict, names = shipped
    snapshot, schema = Snapshot.from_json(snapshot_json), Schema.from_dict(schema_dict)
    for batch in batches:
        for task in batch.column(0).to_pylist():
            partials = []
            with RowGroupDecoder(snapshot, names) as decoder:
                for group in range(task, snapshot.num_row_groups, tasks):
                    table = decoder.decode(group)
                    found = {name: partial_of(table.column(name), schema[name]) for name in names}
                    _refuse_infinite(found, snapshot, group)
                    partials.append(found)
            yield pa.RecordBatch.from_pydict({"partial": [json.dumps(merge(partials), default=str)]})


def _refuse_infinite(found: dict[str, dict[str, Any]], snapshot: Snapshot, group: int) -> None:
    for name, partial in found.items():
        if any(math.isinf(partial.get(end) or 0.0) for end in ("min", "max")):
            file = snapshot.files[int(snapshot.row_groups.file[group])].path or "the file"
            raise SchemaError(
                f"{snapshot.uri}: column {name!r} has an infinite value in {file}.",
                fix="Correct or remove these rows in the ETL (a schema's checks put them into quarantine).",
            )


def _finish(spec: Field, merged: dict[str, Any]) -> FieldStatistics:
    count, nulls = merged["count"], merged["nulls"]
    if count == 0:
        raise SchemaError(
            f"column {spec.name!r} has only nulls or NaN: its preprocessing ({spec.step}) has nothing to learn from.",
            fix="Check the ETL, or leave the field out of the schema's features.",
        )
    if "words" in merged:
        ranked = sorted(merged["words"], key=lambda item: (-item[1], item[0]))
        return FieldStatistics(count, nulls, vocabulary=tuple(w for w, _ in ranked[: int(spec.options["max"])]))
    # Rounding gives a constant column a spread of its own, by which scores of other values would be divided.
    spread = 0.0 if merged["min"] == merged["max"] else math.sqrt(merged["squares"] / count)
    if not math.isfinite(spread):
        raise SchemaError(
            f"column {spec.name!r} has values from {merged['min']:g} to {merged['max']:g}: too wide for a float.",
            fix="Correct or remove these rows in the ETL (checks: {min: ..., max: ...} put them into quarantine).",
        )
    boundaries = None
    if "points" in merged:
        boundaries = _quantiles(merged["points"], int(spec.options["quantiles"]))
    return FieldStatistics(
        count,
        nulls,
        mean=merged["mean"],
        std=spread,
        min=merged["min"],
        max=merged["max"],
        boundaries=boundaries,
    )


def _quantiles(points: list[list[float]], buckets: int) -> tuple[float, ...]:
    """The ``buckets - 1`` inner boundaries of buckets of equal weight."""
    ordered = np.asarray(sorted(points))
    weights = np.cumsum(ordered[:, 1])
    targets = weights[-1] * np.arange(1, buckets) / buckets
    at = np.minimum(np.searchsorted(weights, targets), len(ordered) - 1)
    return tuple(float(value) for value in ordered[at, 0])


def _is_measured(spec: Field) -> bool:
    """Whether mean and range are wanted, beside the count of nulls; of floats, since one may be infinite."""
    number = _is_number(spec.arrow_type) and spec.role == "label" and not spec.shape
    number |= pa.types.is_floating(spec.arrow_type)
    return number or spec.step == "standardize" or "quantiles" in spec.options


def _is_counted(spec: Field) -> bool:
    """Whether its nulls alone are counted: a flat column that refuses them."""
    kind = spec.arrow_type
    return spec.nulls == "refuse" and not pa.types.is_nested(kind) and not pa.types.is_binary(kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
    )


def as_numbers(values: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Values without nulls as float64, NaN left out; dates are days, timestamps microseconds since 1970."""
    if pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
    numbers = np.asarray(values.cast(pa.float64()), dtype=np.float64)
    return numbers[~np.isnan(numbers)]


def _field_from_json(found: dict[str, Any]) -> FieldStatistics:
    tuples = {key: None if found[key] is None else tuple(found[key]) for key in ("vocabulary", "boundaries")}
    return FieldStatistics(**{**found, **tuples})
