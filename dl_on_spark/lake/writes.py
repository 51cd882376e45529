"""Atomic, idempotent replacement of a table's partitions.

Spark writes the new partitions into ``_staging/<id>/`` inside the table, which readers ignore. Then
each partition's folder is exchanged with the old one in a single system call, so every reader, ours or
not, sees the whole old day or the whole new one, also when the writer is killed. The same rows give the
same files: rows are sorted, names are fixed.

A writer holds a lock on its staging folder while it lives; the next writer removes the folders of dead
ones. Where the file system has no exchange, the old folder is moved aside first: a kill between the two
renames leaves the old day under ``_staging``, and the next writer puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from dl_on_spark.errors import InputError, TableError
from dl_on_spark.lake.storage import PathLike, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STAGING = "_staging"
_LOCK = "lock"
_NEW, _OLD = "new", "old"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True)
class WrittenPartition:
    """One partition folder as it was published: ``name`` like ``date=2013-06-30``."""

    name: str
    rows: int
    bytes: int
    files: int


@dataclass(frozen=True)
class WriteReport:
    """What a write published, by partition."""

    uri: str
    partitions: tuple[WrittenPartition, ...]

    @property
    def rows(self) -> int:
        """Rows of all partitions."""
        return sum(partition.rows for partition in self.partitions)


def write_partitions(
    rows: DataFrame,
    uri: PathLike,
    *,
    partition_by: str,
    sort_by: Sequence[str] = (),
    rows_per_file: int = 1_000_000,
    replaces: Iterable[object] = (),
) -> WriteReport:
    """Replace the partitions of `uri` that `rows` holds; all others stay.

    ``replaces``: partition values that this write stands for; one without rows loses its folder.

    ``partition_by``: the column that names the folders. ``sort_by``: order of rows within a file; the
    other columns break ties, so that the order does not depend on how Spark ran. A partition has
    ``ceil(rows / rows_per_file)`` files. Raises `InputError` for a table that is not on a file system
    with rename; a failing write leaves the table as it was.
    """
    root = _local_root(uri)
    with _staging_folder(root) as staging:
        _write_with_spark(rows, staging / _NEW, partition_by, sort_by, rows_per_file)
        written = [_finish(folder) for folder in sorted((staging / _NEW).iterdir()) if folder.is_dir()]
        for partition in written:
            _publish(staging, root, partition.name)
        for name in {f"{partition_by}={value}" for value in replaces} - {partition.name for partition in written}:
            _withdraw(staging, root, name)
    return WriteReport(os.fspath(uri), tuple(written))


def _local_root(uri: PathLike) -> Path:
    root = local_path(uri)
    if root is None:
        raise InputError(
            f"{os.fspath(uri)}: partitions are replaced by rename, which this file system does not have.",
            fix="Write the table to a local or mounted folder.",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TableError(f"{root} cannot be made: {error}.", fix="Check the path and its permissions.") from error
    return root


def _write_with_spark(
    rows: DataFrame, folder: Path, partition_by: str, sort_by: Sequence[str], rows_per_file: int
) -> None:
    from pyspark.sql.types import MapType

    ties = [
        field.name
        for field in rows.schema
        if field.name not in {partition_by, *sort_by} and not isinstance(field.dataType, MapType)
    ]
    (
        rows.repartition(partition_by)
        .sortWithinPartitions(partition_by, *sort_by, *ties)
        .write.option("maxRecordsPerFile", rows_per_file)
        .option("compression", "snappy")
        .partitionBy(partition_by)
        .parquet(folder.as_uri())
    )


def _finish(folder: Path) -> WrittenPartition:
    """Give a partition's files their final names and count them; drops Spark's checksum files."""
    names = sorted(
        (path for path in folder.iterdir() if path.suffix == ".parquet" and not path.name.startswith((".", "_"))),
        key=lambda path: path.name.rpartition("-c")[2],  # part-<task>-<uuid>-c<number>.<codec>.parquet
    )
    for path in folder.iterdir():
        if path not in names:
            path.unlink()
    rows = size = 0
    for number, path in enumerate(names):
        rows += pq.read_metadata(path).num_rows
        size += path.stat().st_size
        path.rename(folder / f"part-{number:05d}.parquet")
    return WrittenPartition(folder.name, rows, size, len(names))


def _publish(staging: Path, root: Path, name: str) -> None:
    """Make the staged partition `name` the table's own, in one step."""
    new, target = staging / _NEW / name, root / name
    try:
        new.rename(target)  # works when there is no such partition yet, or an empty one
        return
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
    if _exchange(new, target):
        return
    old = staging / _OLD / name
    old.parent.mkdir(exist_ok=True)
    target.rename(old)
    new.rename(target)


def _withdraw(staging: Path, root: Path, name: str) -> None:
    """Take a partition out of the table, in one step."""
    if (root / name).is_dir():
        old = staging / _OLD / f"{name}.withdrawn"
        old.parent.mkdir(exist_ok=True)
        (root / name).rename(old)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders atomically (Linux ``renameat2``); False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        return False
    raise OSError(code, os.strerror(code), str(b))


@contextlib.contextmanager
def _staging_folder(root: Path) -> Iterator[Path]:
    """A staging folder of our own, locked while we live; those of dead writers are removed first."""
    for folder in (root / _STAGING).glob("*"):
        _remove_if_dead(root, folder)
    staging = root / _STAGING / uuid.uuid4().hex
    staging.mkdir(parents=True)
    with (staging / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    with contextlib.suppress(OSError):  # another writer's folder is in it
        (root / _STAGING).rmdir()


def _remove_if_dead(root: Path, folder: Path) -> None:
    """Put back what a dead writer had moved aside, and remove its staging folder."""
    try:
        lock = (folder / _LOCK).open("r+")
    except FileNotFoundError:
        return  # its writer is between making the folder and locking it, or removing it
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its writer lives
        for old in (folder / _OLD).glob("*"):
            if old.suffix != ".withdrawn" and not (root / old.name).exists():
                old.rename(root / old.name)
        shutil.rmtree(folder, ignore_errors=True)
