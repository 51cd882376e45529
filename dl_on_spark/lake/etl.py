"""Raw sources of some days become checked partitions of a feature table.

Source rows that break their schema go to quarantine, the rest through the transform; its rows are
checked against the feature schema and written by day, each day replaced in one step.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import DLOnSparkError, SchemaError, TableError
from dl_on_spark.lake.checks import (
    CheckReport,
    enforce,
    good_rows,
    rejected_rows,
    report_of,
    with_reasons,
)
from dl_on_spark.lake.ddl import fits, quoted
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.sources import CORRUPT, SOURCE_FILE, Source, missing_days, read_source
from dl_on_spark.lake.storage import join, write_bytes
from dl_on_spark.lake.writes import WriteReport, check_root, write_partitions
from dl_on_spark.references import raised_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Transform = Callable[["SparkSession", dict[str, "DataFrame"], datetime.date, datetime.date], "DataFrame"]


@dataclass(frozen=True)
class EtlReport:
    """What one ETL run read, rejected and wrote. ``missing``: by source, the days without a file."""

    first: datetime.date
    last: datetime.date
    checks: tuple[CheckReport, ...]
    written: WriteReport
    missing: dict[str, list[datetime.date]]

    @property
    def rejected(self) -> int:
        """Rows in quarantine, of all tables."""
        return sum(check.rejected for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON report."""
        return {
            "first": self.first.isoformat(),
            "last": self.last.isoformat(),
            "checks": [check.to_dict() for check in self.checks],
            "missing": {name: [day.isoformat() for day in days] for name, days in self.missing.items()},
            "partitions": [
                {"name": p.name, "rows": p.rows, "bytes": p.bytes, "files": p.files} for p in self.written.partitions
            ],
        }


def run_etl(
    spark: SparkSession,
    *,
    sources: Sequence[Source],
    transform: Transform,
    schema: Schema,
    table: str,
    quarantine: str,
    first: datetime.date,
    last: datetime.date,
    date_column: str = "date",
    max_rejected: float = 0.05,
    rows_per_file: int = 1_000_000,
) -> EtlReport:
    """Process the days `first` to `last`; running it again leaves the same bytes of data.

    A day that has no rows any more loses its partition, unless a source has no file for it: then what
    an earlier run wrote stays. The quality report is left beside the data in ``_quality/``. Raises
    `DataContractError` before anything is written when more than `max_rejected` of a table's rows are
    rejected, `SchemaError` when the transform's columns are not those of `schema`, and `TableError` when it
    gives rows of days that this run does not stand for, or a folder cannot be written.
    """
    for uri in (table, *(join(quarantine, name) for name in (*(source.name for source in sources), schema.name))):
        check_root(uri)
    days = [first + datetime.timedelta(days=i) for i in range((last - first).days + 1)]
    absent = {source.name: missing_days(source, first, last) for source in sources}
    missing = {name: found for name, found in absent.items() if found}
    complete = [day for day in days if not any(day in found for found in missing.values())]
    reports: list[CheckReport] = []
    rejects: list[tuple[str, DataFrame]] = []
    with contextlib.ExitStack() as cached:

        def checked(rows: DataFrame, of: Schema, name: str, *, text: bool) -> DataFrame:
            found = cached.enter_context(_cached(with_reasons(rows, of, text=text)))
            report = report_of(found, of)
            enforce(report, of, max_rejected)
            reports.append(report)
            rejects.append((name, rejected_rows(found)))
            return good_rows(found)

        inputs = {}
        for source in sources:
            rows = read_source(spark, source, first, last)
            if source.schema is not None:
                rows = checked(rows, source.schema, source.name, text=source.format in {"csv", "json"})
            inputs[source.name] = rows.drop(SOURCE_FILE, CORRUPT)
        features = _as_schema(_transformed(transform, spark, inputs, first, last), schema)
        good = checked(features, schema, schema.name, text=False)
        if reports[-1].rows == reports[-1].rejected:
            raise TableError(
                f"the transform gave no rows for {first} to {last}.",
                fix="Check the sources of these days and the transform.",
            )
        _check_days(good, date_column, first, last)
        keys = [field.name for field in schema.keys]
        written = write_partitions(
            good, table, partition_by=date_column, sort_by=keys, rows_per_file=rows_per_file, replaces=complete
        )
        for name, rows in rejects:
            _quarantine(rows, join(quarantine, name), date_column, days, replaces=complete)
    report = EtlReport(first, last, tuple(reports), written, missing)
    write_bytes(join(table, "_quality", f"{first}_{last}.json"), json.dumps(report.to_dict(), indent=1).encode())
    return report


def _transformed(
    transform: Transform,
    spark: SparkSession,
    inputs: dict[str, DataFrame],
    first: datetime.date,
    last: datetime.date,
) -> DataFrame:
    """The transform's rows. What Spark refuses in it, and an error of its Python, is a `TableError` that names it."""
    from pyspark.errors import AnalysisException
    from pyspark.errors.exceptions.captured import CapturedException

    name = f"{transform.__module__}:{getattr(transform, '__qualname__', transform)}"
    try:
        rows = transform(spark, inputs, first, last)
    except AnalysisException as error:
        raise TableError(
            f"the transform {name} does not fit its sources: {str(error).splitlines()[0].partition(' SQLSTATE:')[0]}",
            fix="Mend the transform, or the source that it reads.",
        ) from error
    except (DLOnSparkError, MemoryError, ConnectionError, TimeoutError, CapturedException):
        raise  # these say themselves what was wrong, and it need not be the transform
    except Exception as error:
        raise TableError(
            f"the transform {name} raised {type(error).__name__}: {error}{raised_in(error)}.",
            fix="Mend the transform. Nothing was written.",
        ) from error
    if not hasattr(rows, "schema"):
        raise TableError(
            f"the transform {name} returned {type(rows).__name__}, not a DataFrame.", fix="Return the feature rows."
        )
    return rows


def _check_days(rows: DataFrame, date_column: str, first: datetime.date, last: datetime.date) -> None:
    """Refuse rows of other days: they would take the place of a whole day that another run wrote."""
    from pyspark.sql import functions as F

    if date_column not in rows.columns:
        raise SchemaError(
            f"the feature table has no column {date_column!r} to be partitioned by "
            f"(columns: {', '.join(rows.columns)}).",
            fix="Mend date_column, or add the column to schema and transform.",
        )
    (ends,) = rows.agg(F.min(quoted(date_column)), F.max(quoted(date_column))).collect()
    for day in ends:
        if not str(first) <= str(day) <= str(last):
            raise TableError(
                f"the transform gave rows of {date_column}={day} in a run for {first} to {last}.",
                fix="Let the transform keep to first_day and last_day. Nothing was written.",
            )


def _as_schema(rows: DataFrame, schema: Schema) -> DataFrame:
    """The transform's rows with exactly the schema's columns, in its order."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_type

    for field in schema.fields:
        if field.name not in rows.columns:
            raise SchemaError(
                f"the transform gives no column {field.name!r}, which {schema.source} asks for "
                f"(it gives: {', '.join(rows.columns)}).",
                fix="Add it to the transform, or take it out of the schema.",
            )
        have = to_arrow_type(rows.schema[field.name].dataType)
        if not fits(have, field.arrow_type):
            raise SchemaError(
                f"the transform gives column {field.name!r} the type {have}; {schema.source} asks for {field.type}.",
                fix=f"Cast it in the transform: .cast({field.type!r}).",
            )
    types = {field.name: field.dataType for field in schema.to_spark()}
    return rows.select(*(F.col(quoted(f.name)).cast(types[f.name]).alias(f.name) for f in schema.fields))


def _quarantine(
    rows: DataFrame, uri: str, date_column: str, days: Sequence[datetime.date], replaces: Sequence[datetime.date]
) -> None:
    """Keep rejected rows with their reasons, by day; a day that has none any more loses its folder."""
    from pyspark.sql import functions as F

    if date_column not in rows.columns:
        rows = rows.withColumn(date_column, F.lit(days[-1]))
    rows = rows.where(F.col(quoted(date_column)).isin(*days))  # days read for lookback belong to another run
    write_partitions(rows, uri, partition_by=date_column, replaces=replaces)


@contextlib.contextmanager
def _cached(rows: DataFrame) -> Iterator[DataFrame]:
    """Rows that are counted, then split: read and checked once."""
    rows.persist()
    try:
        yield rows
    finally:
        rows.unpersist()
