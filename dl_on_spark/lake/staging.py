"""Where new partitions wait inside a table, and how they take the place of the old ones.

::

    _staging/gate              locked for the moments in which a writer begins, commits or cleans up
    _staging/<id>/lock         locked by a writer for as long as it lives
    _staging/<id>/new/<name>   the partition as it is being written
    _staging/<id>/old/<name>   the partition it replaces, where folders cannot be exchanged
    _staging/<id>/gone/<name>  a partition that is withdrawn

Readers ignore names that begin with ``_``. A commit exchanges the folder ``new/<name>`` with the table's
own in one system call (Linux ``renameat2``), so every reader sees the whole old or the whole new one,
also when the writer is killed. A file system without exchange needs two renames: old to ``old/<name>``,
then new to its place. After a kill between the two, `set_aside` shows the old files to our readers and
the next writer puts them back. Locks (``flock``) end with their process: a folder whose lock is free, or
that has none while the gate is closed, belongs to a dead writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from dl_on_spark.errors import TableError

_STAGING, _GATE, _LOCK = "_staging", "gate", "lock"
_NEW, _OLD, _GONE = "new", "old", "gone"
_SET_ASIDE = re.compile(rf"{_STAGING}/[^/]+/{_OLD}/([^/]+)/.+")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_GATE_DEADLINE_S = 120.0


def set_aside(files: Collection[str], folders: Collection[str]) -> set[str]:
    """Those of a table's `files` that stand for a partition whose own place is empty.

    All paths are relative to the table. Empty unless a commit was cut short on a file system that
    cannot exchange folders.
    """
    found = ((path, _SET_ASIDE.fullmatch(path)) for path in files)
    return {path for path, match in found if match and match[1] not in folders}


class Staging:
    """One writer's folder in a table: write partitions to `new`, then `commit` them."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self.new = folder / _NEW

    def commit(self, publish: Collection[str], withdraw: Collection[str] = ()) -> None:
        """Let the folders `publish` of `new` replace the table's own; take `withdraw` out of the table.

        Each folder changes in one step; a kill between two of them leaves the ones before it new, the
        ones after it old. Writers commit one after the other, so that the last one wins.
        """
        with _gate(self._root):
            for name in publish:
                self._publish(name)
            for name in withdraw:
                if (self._root / name).is_dir():
                    _move(self._root / name, self._folder / _GONE / name)
            _sync(self._root)

    def _publish(self, name: str) -> None:
        new, target = self.new / name, self._root / name
        try:
            new.rename(target)  # works when there is no such partition yet, or an empty one
            return
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        if not _exchange(new, target):
            _move(target, self._folder / _OLD / name)
            new.rename(target)


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Staging]:
    """A staging folder of our own in the table `root`; those of dead writers are removed first."""
    (root / _STAGING).mkdir(exist_ok=True)
    folder = root / _STAGING / uuid.uuid4().hex
    with contextlib.ExitStack() as opened:
        dead: list[Path] = []
        with _gate(root):
            for other in (root / _STAGING).iterdir():
                if other.is_dir() and _claim(other, opened):
                    _put_back(root, other)
                    dead.append(other)
            folder.mkdir()
            lock = opened.enter_context((folder / _LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        for other in dead:
            shutil.rmtree(other, ignore_errors=True)
        try:
            yield Staging(root, folder)
        finally:
            with _gate(root):
                _put_back(root, folder)
            shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring the files of `folder` to the disk, so that a power cut after the commit loses none."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _gate(root: Path) -> Iterator[None]:
    with (root / _STAGING / _GATE).open("a") as gate:
        deadline = time.monotonic() + _GATE_DEADLINE_S
        while not _locked(gate):
            if time.monotonic() > deadline:
                raise TableError(
                    f"{root}: another writer has been committing for {_GATE_DEADLINE_S:.0f} s.",
                    fix=f"See which process holds {root / _STAGING / _GATE} (fuser), end it and try again.",
                )
            time.sleep(0.02)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _claim(folder: Path, opened: contextlib.ExitStack) -> bool:
    """Whether the writer of `folder` is dead; its lock is ours then. Call with the gate closed."""
    try:
        lock = opened.enter_context((folder / _LOCK).open("r+"))
    except FileNotFoundError:
        return True  # killed before it had a lock, or files written late by a dead writer's JVM
    return _locked(lock)


def _put_back(root: Path, folder: Path) -> None:
    """Undo the first of the two renames of a commit that has not come to the second."""
    for old in (folder / _OLD).glob("*"):
        if not (root / old.name).exists():
            old.rename(root / old.name)


def _move(folder: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)


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
