"""Our filters as pyiceberg's, for pruning alone: what cannot be said exactly is left out, so no row is lost."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa

from dl_on_spark.lake.predicates import Compare, In, IsNull, Junction, Node, Not

_OPERATORS = {
    "=": "EqualTo",
    "!=": "NotEqualTo",
    "<": "LessThan",
    "<=": "LessThanOrEqual",
    ">": "GreaterThan",
    ">=": "GreaterThanOrEqual",
}


def row_filter(node: Node) -> Any:
    """A pyiceberg expression that is true for at least all the rows for which `node` is true."""
    from pyiceberg import expressions

    found = _translated(node)[0]
    return expressions.AlwaysTrue() if found is None else found


def _translated(node: Node) -> tuple[Any, bool]:
    """(expression or None for any row, whether it is true for no more rows than `node` is or is null for)."""
    from pyiceberg import expressions as typed

    expressions: Any = typed  # its constructors take names, which its types do not say
    if isinstance(node, IsNull):
        return expressions.IsNull(node.column), True
    if isinstance(node, (Compare, In)):
        # Spark orders NaN above all numbers; it is in no statistics of Iceberg's.
        if pa.types.is_floating(node.type) or pa.types.is_null(node.type):
            return None, False
        if isinstance(node, In):
            return expressions.In(node.column, tuple(_value(value) for value in node.values)), True
        return getattr(expressions, _OPERATORS[node.operator])(node.column, _value(node.value)), True
    if isinstance(node, Not):
        expression, exact = _translated(node.operand)
        return (expressions.Not(expression), True) if exact else (None, False)
    assert isinstance(node, Junction)
    parts = [_translated(operand) for operand in node.operands]
    said = [expression for expression, _ in parts if expression is not None]
    if not said or (node.absorbing and len(said) < len(parts)):
        return None, False
    joined = said[0]
    for expression in said[1:]:
        joined = expressions.Or(joined, expression) if node.absorbing else expressions.And(joined, expression)
    return joined, all(exact for _, exact in parts)


def _value(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime.date) else value
