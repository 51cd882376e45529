"""A schema's checks as Spark expressions: every row gets the list of reasons why it is rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import DataContractError, SchemaError
from dl_on_spark.lake.ddl import quoted
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.sources import CORRUPT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

REASONS = "reasons"


@dataclass(frozen=True)
class CheckReport:
    """Outcome of the checks of one table: rows seen, rows rejected, and how often for which reason."""

    name: str
    rows: int
    rejected: int
    reasons: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON report."""
        return {"name": self.name, "rows": self.rows, "rejected": self.rejected, "reasons": self.reasons}


def with_reasons(rows: DataFrame, schema: Schema, *, text: bool) -> DataFrame:
    """`rows` with the schema's columns typed, and a column ``reasons`` (array of text, empty when good).

    ``text``: the columns hold text (CSV) and are cast here; a value that is no such number, date or
    time is a reason. Columns that the schema does not name stay as they are. Checks run where the rows
    are read, in the same pass. Raises `SchemaError` for a column that is not there.
    """
    from pyspark.sql import functions as F

    missing = [field.name for field in schema.fields if field.name not in rows.columns]
    if missing:
        raise SchemaError(
            f"{schema.source} asks for the column {missing[0]!r}, which the data does not have "
            f"(columns: {', '.join(rows.columns)}).",
            fix="Mend the schema or the data's header.",
        )
    spark_types = {field.name: field.dataType for field in schema.to_spark()}
    reasons: list[Column] = []
    if CORRUPT in rows.columns:
        reasons.append(F.when(F.col(CORRUPT).isNotNull(), F.lit("row: its values do not fit the columns")))
    typed: dict[str, Column] = {}
    for field in schema.fields:
        column = F.col(quoted(field.name))
        if text and rows.schema[field.name].dataType != spark_types[field.name]:
            ddl = spark_types[field.name].simpleString()
            cast = F.expr(f"try_cast({quoted(field.name)} as {ddl})")
            reasons.append(F.when(column.isNotNull() & cast.isNull(), F.lit(f"{field.name}: not {ddl}")))
            typed[field.name] = cast
            column = cast
        reasons += _reasons(field, column, given=F.col(quoted(field.name)))
    found = F.array_compact(F.array(*reasons)) if reasons else F.array().cast("array<string>")
    return rows.select(
        *(typed[name].alias(name) if name in typed else F.col(quoted(name)) for name in rows.columns),
        found.alias(REASONS),
    )


def report_of(checked: DataFrame, schema: Schema) -> CheckReport:
    """Count rows and reasons of a DataFrame that `with_reasons` made; one aggregate."""
    counts: Counter[str] = Counter()
    rows = rejected = 0
    for group in checked.groupBy(REASONS).count().collect():
        rows += group["count"]
        if group[REASONS]:
            rejected += group["count"]
            counts.update(dict.fromkeys(group[REASONS], group["count"]))
    return CheckReport(schema.name, rows, rejected, dict(counts.most_common()))


def enforce(report: CheckReport, schema: Schema, max_rejected: float) -> None:
    """Raise `DataContractError` when too many rows are rejected, over all or by a field's ``fraction``."""
    share = report.rejected / report.rows if report.rows else 0.0
    if share > max_rejected:
        worst = ", ".join(f"{reason} ({count:,})" for reason, count in list(report.reasons.items())[:3])
        raise DataContractError(
            f"{report.name}: {report.rejected:,} of {report.rows:,} rows ({share:.1%}) break the checks of "
            f"{schema.source}, more than the {max_rejected:.1%} allowed. Most frequent: {worst}.",
            fix="Mend the source, the check, or raise etl.max_rejected. Nothing was written.",
        )
    for field in schema.fields:
        least = field.checks.fraction
        broken = sum(count for reason, count in report.reasons.items() if reason.startswith(f"{field.name}: "))
        if least is not None and report.rows and 1 - broken / report.rows < least:
            raise DataContractError(
                f"{report.name}: column {field.name!r} passes its checks in {1 - broken / report.rows:.1%} of "
                f"the rows; {schema.source} asks for {least:.1%}.",
                fix="Mend the source or the check. Nothing was written.",
            )


def good_rows(checked: DataFrame) -> DataFrame:
    """The rows without a reason, in their own columns."""
    from pyspark.sql import functions as F

    return checked.where(F.size(REASONS) == 0).drop(REASONS)


def rejected_rows(checked: DataFrame) -> DataFrame:
    """The rows with at least one reason."""
    from pyspark.sql import functions as F

    return checked.where(F.size(REASONS) > 0)


def _reasons(field: Field, column: Column, given: Column) -> Sequence[Column]:
    """For each check of a field, its reason where a row breaks it (else null).

    ``given``: the column before its cast, so that text that is no number is not called a null as well.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.window import Window

    checks = field.checks
    broken: list[tuple[Column, str]] = []
    if checks.not_null or not field.nullable:
        broken.append((given.isNull(), "null"))
    if field.type in {"float", "double"}:
        broken.append((F.abs(column) == F.lit(float("inf")), "infinite"))
        if checks.not_null or not field.nullable:
            broken.append((F.isnan(column), "NaN"))
    if checks.min is not None:
        broken.append((column < F.lit(checks.min), f"below {_text(checks.min)}"))
    if checks.max is not None:
        broken.append((column > F.lit(checks.max), f"above {_text(checks.max)}"))
    if checks.one_of is not None:
        allowed = ", ".join(_text(value) for value in checks.one_of)
        broken.append((~column.isin(*checks.one_of), f"not one of {allowed}"))
    if checks.regex is not None:
        broken.append((~column.rlike(f"^(?:{checks.regex})$"), f"does not match {checks.regex}"))
    if checks.unique:
        same = F.count(F.lit(1)).over(Window.partitionBy(column))
        broken.append((column.isNotNull() & (same > 1), "not unique"))
    return [F.when(condition, F.lit(f"{field.name}: {reason}")) for condition, reason in broken]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
