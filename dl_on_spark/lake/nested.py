"""Columns inside structs, by dotted name: ``place.x`` is field x of the struct column place.

A column whose own name has a dot is found first, so that no name changes its meaning.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def path_of(schema: pa.Schema, name: str) -> tuple[str, ...] | None:
    """The way to a column from the top: ``(name,)`` or ``(struct, …, field)``; None where there is none."""
    if name in schema.names:
        return (name,)
    for at, letter in enumerate(name):
        if letter == "." and name[:at] in schema.names and pa.types.is_struct(schema.field(name[:at]).type):
            below = path_of(pa.schema(list(schema.field(name[:at]).type)), name[at + 1 :])
            if below is not None:
                return (name[:at], *below)
    return None


def field_of(schema: pa.Schema, name: str) -> pa.Field | None:
    """The field at a dotted name, under that name, with its metadata; null where any struct around it is null."""
    path = path_of(schema, name)
    if path is None:
        return None
    field = schema.field(path[0])
    nullable = field.nullable
    for step in path[1:]:
        field = field.type.field(step)
        nullable |= field.nullable
    return pa.field(name, field.type, nullable, field.metadata)


def names_of(schema: pa.Schema) -> list[str]:
    """All names that can be asked for: columns, and for structs their fields by dotted names."""
    found: list[str] = []
    for field in schema:
        found.append(field.name)
        if pa.types.is_struct(field.type):
            found += [f"{field.name}.{name}" for name in names_of(pa.schema(list(field.type)))]
    return found


def column_of(table: pa.Table, path: tuple[str, ...]) -> pa.ChunkedArray:
    """The column at the end of a path."""
    column = table.column(path[0])
    for step in path[1:]:
        column = pc.struct_field(column, [column.type.get_field_index(step)])
    return column
