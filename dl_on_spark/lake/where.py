"""The filter language of `Table.where`: a small part of Spark SQL, parsed by sqlglot.

Comparisons of a column with a value, IN, BETWEEN, IS [NOT] NULL, AND, OR, NOT and date or timestamp
literals, under SQL's three-valued logic: a row passes when the expression is true, not when it is
null. One tree serves three purposes: partitions and row groups are pruned by the set of outcomes that
their ranges leave possible, and rows are filtered by the same tree as an Arrow expression.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import expressions as sql
from sqlglot.errors import SqlglotError

from dl_on_spark.errors import TableError

Outcomes = frozenset[bool | None]
ANY: Outcomes = frozenset({True, False, None})


@dataclass(frozen=True)
class Range:
    """What is known of a column in some rows: least and greatest value (None: unknown), nulls."""

    low: Any
    high: Any
    nulls: bool
    only_nulls: bool = False

    @classmethod
    def constant(cls, value: Any) -> Range:
        """The range of a column that has one value, as a partition column has in a file."""
        return cls(value, value, value is None, value is None)


@dataclass(frozen=True)
class Compare:
    column: str
    operator: str  # = != < <= > >=
    value: Any
    type: pa.DataType

    def outcomes(self, ranges: Mapping[str, Range]) -> Outcomes:
        known = ranges.get(self.column)
        if known is None:
            return ANY
        if known.only_nulls:
            return frozenset({None})
        found: set[bool | None] = {None} if known.nulls else set()
        if known.low is None or known.high is None:
            return frozenset(found | {True, False})
        possible = _compare_range(self.operator, known.low, known.high, self.value)
        if pa.types.is_floating(self.type):  # NaN is in no statistics; Spark orders it above all numbers
            possible |= {self.operator in {">", ">=", "!="}}
        return frozenset(found | possible)

    def expression(self) -> pc.Expression:
        column = pc.field(self.column)
        if pa.types.is_floating(self.type) or isinstance(self.value, float):
            column, literal = column.cast(pa.float64()), pa.scalar(float(self.value))
        elif pa.types.is_integer(self.type) or pa.types.is_decimal(self.type):
            literal = pa.scalar(self.value)
        else:
            literal = pa.scalar(self.value, self.type)
        compared = _OPERATORS[self.operator](column, literal)
        if pa.types.is_floating(self.type) and self.operator in {">", ">="}:
            compared = compared | pc.is_nan(column)
        return compared

    def columns(self) -> set[str]:
        return {self.column}


@dataclass(frozen=True)
class In:
    """Equality with any of ``values``; one node, since a list may have thousands."""

    column: str
    values: tuple[Any, ...]
    type: pa.DataType

    def outcomes(self, ranges: Mapping[str, Range]) -> Outcomes:
        known = ranges.get(self.column)
        if known is None:
            return ANY
        if known.only_nulls:
            return frozenset({None})
        found: set[bool | None] = {None} if known.nulls else set()
        if known.low is None or known.high is None:
            return frozenset(found | {True, False})
        if any(known.low <= value <= known.high for value in self.values):
            found.add(True)
        certain = known.low == known.high and known.low in self.values
        if not certain or pa.types.is_floating(self.type):  # NaN is in no statistics
            found.add(False)
        return frozenset(found)

    def expression(self) -> pc.Expression:
        column = pc.field(self.column)
        if pa.types.is_floating(self.type):  # the column to the literals' type, as Spark does: 0.1f is not 0.1
            column, values = column.cast(pa.float64()), pa.array(self.values, pa.float64())
        elif pa.types.is_integer(self.type):
            whole = [value for value in self.values if isinstance(value, int)]
            column, values = column.cast(pa.int64()), pa.array(whole, pa.int64())
        elif pa.types.is_decimal(self.type):
            exact = [value for value in self.values if _fits(value, self.type)]
            values = pa.array(exact, self.type)
        else:
            column, values = column.cast(self.type), pa.array(self.values, self.type)
        # Arrow's is_in says false of a null, SQL says null: NOT IN must not let it pass.
        return pc.if_else(column.is_null(), pa.scalar(None, pa.bool_()), column.isin(values))

    def columns(self) -> set[str]:
        return {self.column}


@dataclass(frozen=True)
class IsNull:
    column: str

    def outcomes(self, ranges: Mapping[str, Range]) -> Outcomes:
        known = ranges.get(self.column)
        if known is None:
            return frozenset({True, False})
        if known.only_nulls:
            return frozenset({True})
        return frozenset({True, False} if known.nulls else {False})

    def expression(self) -> pc.Expression:
        return pc.field(self.column).is_null()

    def columns(self) -> set[str]:
        return {self.column}


@dataclass(frozen=True)
class Not:
    operand: Node

    def outcomes(self, ranges: Mapping[str, Range]) -> Outcomes:
        return frozenset(None if o is None else not o for o in self.operand.outcomes(ranges))

    def expression(self) -> pc.Expression:
        return ~self.operand.expression()

    def columns(self) -> set[str]:
        return self.operand.columns()


@dataclass(frozen=True)
class Junction:
    """AND (``absorbing`` False) or OR (``absorbing`` True) of at least one operand."""

    absorbing: bool
    operands: tuple[Node, ...]

    def outcomes(self, ranges: Mapping[str, Range]) -> Outcomes:
        found = self.operands[0].outcomes(ranges)
        for operand in self.operands[1:]:
            found = frozenset(self._join(a, b) for a in found for b in operand.outcomes(ranges))
        return found

    def _join(self, a: bool | None, b: bool | None) -> bool | None:
        if self.absorbing in (a, b):
            return self.absorbing
        return None if a is None or b is None else not self.absorbing

    def expression(self) -> pc.Expression:
        parts = [operand.expression() for operand in self.operands]
        while len(parts) > 1:  # a balanced tree: Arrow walks expressions by recursion
            pairs = zip(parts[::2], parts[1::2], strict=False)
            odd = parts[-1:] if len(parts) % 2 else []
            parts = [a | b if self.absorbing else a & b for a, b in pairs] + odd
        return parts[0]

    def columns(self) -> set[str]:
        return set().union(*(operand.columns() for operand in self.operands))


Node = Compare | In | IsNull | Not | Junction


def parse(text: str, schema: pa.Schema, uri: str) -> Node:
    """The filter `text` over the columns of `schema`.

    Raises `TableError` for syntax outside the language, an unknown column, or a value that a column
    of its type cannot have; the message names table, filter and the part that is wrong.
    """
    return _build(text, schema, uri, partial=False)


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
        names = {known.lower(): known for known in self._schema.names}  # Spark's names ignore case
        found = name if name in self._schema.names else names.get(name.lower())
        if found is None:
            near = difflib.get_close_matches(name, self._schema.names, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Columns: {', '.join(self._schema.names)}."
            start = node.parts[0].meta.get("start")
            at = "" if start is None else f" (at character {start + 1})"
            raise _UnknownColumn(name, _wrong(self._uri, self._text, f"there is no column {name!r}{at}", hint))
        kind = self._schema.field(found).type
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
            return moment.replace(tzinfo=datetime.UTC)
        return moment
    raise TypeError(f"{raw!r} as {kind}")


def _fits(value: Decimal, kind: pa.DataType) -> bool:
    """Whether a decimal column can have exactly this value."""
    try:
        pa.scalar(value, kind)
    except pa.ArrowInvalid:
        return False
    return True


def _compare_range(operator: str, low: Any, high: Any, value: Any) -> set[bool | None]:
    """Possible outcomes of `x operator value` for x in [low, high]."""
    if operator == "=":
        return _pair(low <= value <= high, not low == high == value)
    if operator == "!=":
        return _pair(not low == high == value, low <= value <= high)
    if operator == "<":
        return _pair(low < value, high >= value)
    if operator == "<=":
        return _pair(low <= value, high > value)
    if operator == ">":
        return _pair(high > value, low <= value)
    return _pair(high >= value, low < value)


def _pair(true: bool, false: bool) -> set[bool | None]:
    return {outcome for outcome, possible in ((True, true), (False, false)) if possible}


_EXAMPLE = "Write for example: date >= '2013-06-01' and origin = 'JFK'"
_OPERATORS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_COMPARISONS = {sql.EQ: "=", sql.NEQ: "!=", sql.LT: "<", sql.LTE: "<=", sql.GT: ">", sql.GTE: ">="}
_FLIPPED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
