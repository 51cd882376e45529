"""Conditions on rows under SQL's three-valued logic, as a tree of frozen nodes.

Each node answers two questions: which of true, false and null are possible in rows of which only ranges
are known (`outcomes`, for pruning), and which rows are true (`expression`, an Arrow expression).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

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
            possible |= {True, False} if _is_nan(self.value) else {self.operator in {">", ">=", "!="}}
        return frozenset(found | possible)

    def expression(self) -> pc.Expression:
        column = pc.field(self.column)
        if _is_nan(self.value):  # to Spark, NaN equals itself and is above all numbers
            nan = pc.is_nan(column)
            if self.operator in {"<=", ">"}:
                return nan | ~nan if self.operator == "<=" else nan & ~nan
            return nan if self.operator in {"=", ">="} else ~nan
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
        if any(_is_nan(value) or known.low <= value <= known.high for value in self.values):
            found.add(True)
        certain = known.low == known.high and known.low in self.values
        if not certain or pa.types.is_floating(self.type):  # NaN is in no statistics
            found.add(False)
        return frozenset(found)

    def expression(self) -> pc.Expression:
        column = pc.field(self.column)
        if pa.types.is_floating(self.type):  # the column to the literals' type, as Spark does: 0.1f is not 0.1
            # Adding 0.0 makes -0.0 the 0.0 that it equals: is_in compares bits.
            column, values = column.cast(pa.float64()) + 0.0, pa.array([v + 0.0 for v in self.values], pa.float64())
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


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


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


_OPERATORS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
