"""A DataFrame as a table to train on: the one it reads, or a temporary one that it is written to once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import InputError, TableError
from dl_on_spark.input_pipeline import open_table
from dl_on_spark.lake import Schema, Table, storage
from dl_on_spark.lake.ddl import quoted
from dl_on_spark.lake.spark_session import spark_context

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# As the sample plan's streams: the same files for 1, 2, 4 and 8 workers, so the same global batches.
_LEAST_FILES = 8


def tables_of(
    rows: DataFrame, schema: Schema, indicator: str | None, folder: str, num_workers: int
) -> tuple[Table, Table | None]:
    """Tables of the rows to train on and to validate with; what must be written goes below `folder`.

    ``indicator``: a boolean column, true for rows to validate with; a row with a null there is left out.
    """
    table = in_place(rows, schema)
    if indicator is None:
        return table or _written(rows, schema, storage.join(folder, "rows"), num_workers), None
    which = quoted(indicator)
    if table is not None:
        return table.where(f"{which} = false"), table.where(f"{which} = true")
    rows = rows.select(*(quoted(name) for name in dict.fromkeys([*schema.feed_columns, indicator])))
    return (
        _written(rows.where(f"not {which}"), schema, storage.join(folder, "rows"), num_workers),
        _written(rows.where(which), schema, storage.join(folder, "validation"), num_workers),
    )


def in_place(rows: DataFrame, schema: Schema) -> Table | None:
    """The Parquet table that the DataFrame is, row for row; None where that is not certain."""
    path = _scanned_folder(rows)
    if path is None:
        return None
    table = open_table(path)
    try:
        snapshot = table.snapshot()
        schema.check(snapshot.schema, path, schema.feed_columns)
    except (InputError, OSError):  # Spark may know better how to read it
        return None
    root = storage.locate(snapshot.uri).path
    ours = {f"{root}/{file.path}" if file.path else root for file in snapshot.files}
    # Files that came after the DataFrame was made are not its own.
    return table if ours <= {storage.locate(file).path for file in rows.inputFiles()} else None


def _scanned_folder(rows: DataFrame) -> str | None:
    """The one folder of ``spark.read.parquet(folder)`` or of a table over it, with no option, filter or selection."""
    if spark_context(rows.sparkSession) is None:
        return _scanned_by_client(rows)
    plan = rows._jdf.queryExecution().analyzed()
    while _class(plan) == "SubqueryAlias":
        plan = plan.child()
    if _class(plan) != "LogicalRelation" or _class(plan.relation()) != "HadoopFsRelation":
        return None
    relation = plan.relation()
    folders = relation.location().rootPaths()
    options = set(_words(relation.options().keysIterator()))
    if _class(relation.fileFormat()) != "ParquetFileFormat" or folders.size() != 1 or options - {"path"}:
        return None
    return str(folders.head().toString())


def _scanned_by_client(rows: DataFrame) -> str | None:
    """As `_scanned_folder`, from the plan that a Connect client keeps."""
    plan: Any = rows._plan
    if type(plan).__name__ != "DataSource" or getattr(plan, "_format", None) != "parquet":
        return None
    paths = getattr(plan, "_paths", None) or []
    plain = not getattr(plan, "_schema", "unknown") and not getattr(plan, "_options", "unknown")
    return str(paths[0]) if plain and len(paths) == 1 and "*" not in paths[0] else None


def _class(object_of_java: Any) -> str:
    return str(object_of_java.getClass().getSimpleName())


def _words(iterator: Any) -> Sequence[str]:
    found = []
    while iterator.hasNext():
        found.append(str(iterator.next()))
    return found


def _written(rows: DataFrame, schema: Schema, folder: str, num_workers: int) -> Table:
    """The columns that training reads, in files of equal rows that the workers divide evenly."""
    files = num_workers * -(-_LEAST_FILES // num_workers)
    local = storage.local_path(folder)
    # Hadoop takes the path of a URI as it stands: a space written as %20 would be another folder.
    target = folder if local is None else f"file:{local}"
    columns = [quoted(name) for name in schema.feed_columns]
    rows.select(*columns).repartition(files).write.parquet(target)
    table = open_table(folder)
    try:
        table.snapshot()
    except TableError as error:
        if "has no rows" in error.message:
            raise InputError(
                "the DataFrame has no rows to train on, or to validate with.",
                fix="Check its filters, and validationIndicatorCol.",
            ) from error
        raise
    return table
