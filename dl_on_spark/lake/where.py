"""The filter language of `Table.where`: a small part of Spark SQL, parsed by sqlglot.

Comparisons of a column with a value, IN, BETWEEN, IS [NOT] NULL, AND, OR, NOT and date or timestamp
literals, under SQL's three-valued logic: a row passes when the expression is true, not when it is
null. A field of a struct is named with dots. One tree (`lake.predicates`) serves three purposes: partitions
and row groups are pruned by the outcomes that their ranges leave possible, and rows are filtered by the
same tree as an Arrow expression. A timestamp literal without a zone is UTC.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import sqlglot
from sqlglot import expressions as sql
from sqlglot.errors import SqlglotError

from dl_on_spark.errors import TableError
from dl_on_spark.lake import nested
from dl_on_spark.lake.predicates import Compare, In, IsNull, Junction, Node, Not, Range


def parse(text: str, schema: pa.Schema, uri: str) -> Node:
    """The filter `text` over the columns of `schema`.

    Raises `TableError` for syntax outside the language, an unknown column, or a value that a column
    of its type cannot have; the message names table, filter and the part that is wrong.
    """
    return _build(text, schema, uri, partial=False)


def columns_in(text: str | None) -> set[str]:
    """Names that the filter `text` may mean, before its table's schema is known; none of a text that is no filter."""
    if text is None:
        return set()
    try:
        tree = sqlglot.parse_one(text, read="spark")
    except (SqlglotError, RecursionError):
        return set()  # `parse` says what is wrong with it
    return {".".join(part.name for part in column.parts) for column in tree.find_all(sql.Column)}


def partition_test(text: str, schema: pa.Schema, uri: str) -> Callable[[Mapping[str, Any]], bool]:
    """Whether rows in a partition of these values may pass `text`, before any file is opened.

    `schema` has the partition columns alone; any other column may have any value.
    """
    node = _build(text, schema, uri, partial=True)
    names = node.columns()
    return lambda values: (
        True in node.outcomes({name: Range.constant(value) for name, value in values.items() if name in names})
    )


def _build(text: str, schema: pa.Schema, uri: str, *, partial: bool) -> Node:
    try:
        tree = sqlglot.parse_one(text, read="spark")
        return _Builder(text, schema, uri, partial).build(tree)
    except _UnknownColumn as unknown:
        raise unknown.error from None
    except SqlglotError as error:
        found = (getattr(error, "errors", None) or [{}])[0]
        detail = str(found.get("description") or error).splitlines()[0].rstrip(".")
        column = f" at character {found['col']}" if found.get("col") else ""
        raise _wrong(uri, text, detail + column, _EXAMPLE) from error
    except RecursionError as error:
        raise _wrong(uri, text[:80], "it is nested too deeply", "Use IN for long lists of values.") from error


class _Builder:
    """sqlglot's tree becomes ours; everything not in the language is refused by name."""

    def __init__(self, text: str, schema: pa.Schema, uri: str, partial: bool) -> None:
        self._text, self._schema, self._uri, self._partial = text, schema, uri, partial

    def build(self, node: Any) -> Node:
        try:
            return self._build(node)
        except _UnknownColumn as unknown:
            if not self._partial:
                raise
            return Compare(unknown.column, "=", None, pa.null())  # of no known range: any outcome

    def _build(self, node: Any) -> Node:
        if isinstance(node, sql.Paren):
            return self.build(node.this)
        if isinstance(node, (sql.And, sql.Or)):
            operands = tuple(self.build(operand) for operand in node.flatten(unnest=False))
            return Junction(isinstance(node, sql.Or), operands)
        if isinstance(node, sql.Not):
            return Not(self.build(node.this))
        if isinstance(node, sql.Between):
            low, high = node.args["low"], node.args["high"]
            return Junction(False, (self._compare(">=", node.this, low), self._compare("<=", node.this, high)))
        if isinstance(node, sql.In):
            if not node.expressions:
                raise self._refuse(node, "IN needs a list of values")
            name, kind = self._column(node.this)
            return In(name, tuple(self._value(value, name, kind) for value in node.expressions), kind)
        if isinstance(node, sql.Is):
            if not isinstance(node.expression, sql.Null):
                raise self._refuse(node, "only IS NULL and IS NOT NULL are known")
            return IsNull(self._column(node.this)[0])
        if isinstance(node, sql.Column):
            name, kind = self._column(node)
            if pa.types.is_boolean(kind):
                return Compare(name, "=", True, kind)
            raise self._refuse(node, f"the column has type {kind}, not boolean")
        for kind_of, operator in _COMPARISONS.items():
            if isinstance(node, kind_of):
                return self._comparison(operator, node)
        raise self._refuse(node, f"{node.key.upper()} is not part of the filter language")

    def _comparison(self, operator: str, node: Any) -> Node:
        left, right = node.left, node.right
        if isinstance(right, sql.Column) and not isinstance(left, sql.Column):
            return self._compare(_FLIPPED[operator], right, left)
        return self._compare(operator, left, right)

    def _compare(self, operator: str, column: Any, value: Any) -> Compare:
        name, kind = self._column(column)
        return Compare(name, operator, self._value(value, name, kind), kind)

    def _column(self, node: Any) -> tuple[str, pa.DataType]:
        if isinstance(node, sql.Paren):
            return self._column(node.this)
        if not isinstance(node, sql.Column):
            raise self._refuse(node, "a column's name is expected here")
        name = ".".join(part.name for part in node.parts)
        known = nested.names_of(self._schema)
        found = name if name in known else {one.lower(): one for one in known}.get(name.lower())  # as Spark's names
        if found is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Columns: {', '.join(self._schema.names)}."
            start = node.parts[0].meta.get("start")
            at = "" if start is None else f" (at character {start + 1})"
            raise _UnknownColumn(name, _wrong(self._uri, self._text, f"there is no column {name!r}{at}", hint))
        field = nested.field_of(self._schema, found)
        assert field is not None
        kind = field.type
        return found, kind.value_type if pa.types.is_dictionary(kind) else kind

    def _value(self, node: Any, column: str, kind: pa.DataType) -> Any:
        if isinstance(node, sql.Null):
            raise self._refuse(node, "a comparison with NULL is never true; use IS NULL")
        negative = isinstance(node, sql.Neg)
        literal = node.this if negative else node
        if isinstance(literal, sql.Cast):  # date '2013-06-01'
            literal = literal.this
        if isinstance(literal, (sql.TsOrDsToDate, sql.Date, sql.Timestamp)):
            literal = literal.this
        if isinstance(literal, sql.Boolean):
            raw: Any = literal.this
        elif isinstance(literal, sql.Literal):
            raw = literal.this if literal.is_string else _number(literal.this)
        else:
            raise self._refuse(node, "a value is expected here")
        if negative:
            if isinstance(raw, (str, bool)):
                raise self._refuse(node, "only a number can be negative")
            raw = -raw
        try:
            return _coerce(raw, kind)
        except (ValueError, TypeError) as error:
            text = f"the column {column!r} has type {kind}; {raw!r} is not such a value"
            raise _wrong(self._uri, self._text, text, "Write a value of the column's type.") from error

    def _refuse(self, node: Any, reason: str) -> TableError:
        part = node.sql(dialect="spark") if hasattr(node, "sql") else str(node)
        return _wrong(
            self._uri,
            self._text,
            f"{part!r}: {reason}",
            "The language: comparisons of a column with a value, IN, BETWEEN, IS NULL, AND, OR, NOT.",
        )


class _UnknownColumn(Exception):
    def __init__(self, column: str, error: TableError) -> None:
        super().__init__(column)
        self.column = column
        self.error = error


def _wrong(uri: str, text: str, detail: str, fix: str) -> TableError:
    return TableError(f"filter {text!r} on {uri}: {detail}.", fix=fix)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    return int(number) if text.isdigit() else number


def _coerce(raw: Any, kind: pa.DataType) -> Any:
    """The literal as a value that compares with a column of type `kind`."""
    if pa.types.is_boolean(kind):
        if isinstance(raw, bool):
            return raw
    elif pa.types.is_integer(kind):
        number = int(raw) if isinstance(raw, str) else raw
        if not isinstance(raw, bool):
            if abs(number) >= 2**63:
                raise ValueError(f"{raw!r} is beyond 64 bits")
            return int(number) if number == int(number) else float(number)
    elif pa.types.is_floating(kind):
        if not isinstance(raw, bool):
            return float(raw)
    elif pa.types.is_decimal(kind):
        if not isinstance(raw, bool):
            return Decimal(raw)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if isinstance(raw, str):
            return raw
    elif pa.types.is_date(kind):
        if isinstance(raw, str):
            return datetime.date.fromisoformat(raw)
    elif pa.types.is_timestamp(kind) and isinstance(raw, str):
        moment = datetime.datetime.fromisoformat(raw)
        if kind.tz is not None and moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        pa.scalar(moment, kind)  # raises for a year that nanoseconds cannot hold
        return moment
    raise TypeError(f"{raw!r} as {kind}")


_EXAMPLE = "Write for example: date >= '2013-06-01' and origin = 'JFK'"
_COMPARISONS = {sql.EQ: "=", sql.NEQ: "!=", sql.LT: "<", sql.LTE: "<=", sql.GT: ">", sql.GTE: ">="}
_FLIPPED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
