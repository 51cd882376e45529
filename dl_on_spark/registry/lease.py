"""One process at a time, also on an object store.

A file system has locks, which the kernel frees when their holder dies. An object store has only put and list, and both
are seen by all at once (S3 since 2020, GCS, ABFS): a process puts a claim of its own, lists the claims, and holds the
lease if its is the only one. Of two claims put before either was listed both go, and try again after a while of chance;
two can never each find themselves alone. A claim that its holder left behind counts no more after `STALE_S` by the
store's own clock, so a holder must have ended its work well before: `Lease.check` says when it may no longer write.
"""

from __future__ import annotations

import contextlib
import fcntl
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs as pafs

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage

STALE_S = 60.0
_HELD_S = 20.0
_FILE = ".current.lock"
_FOLDER = "claims"


@dataclass(frozen=True)
class Lease:
    """What the holder has: the right to write, for a while."""

    ends: float  # of time.monotonic

    def check(self) -> None:
        """Raise `InputError` where the lease may have gone to another process meanwhile."""
        if time.monotonic() > self.ends:
            raise InputError("the store answered too slowly to publish safely.", fix="Run this job again.")


@contextlib.contextmanager
def lease(folder: str, deadline_s: float, stale_s: float = STALE_S) -> Iterator[Lease]:
    """Hold `folder` alone. Raises `InputError` where another process holds it for `deadline_s`."""
    local = storage.local_path(folder)
    with _locked(local, deadline_s) if local is not None else _claimed(folder, deadline_s, stale_s) as held:
        yield held


@contextlib.contextmanager
def _locked(folder: Path, deadline_s: float) -> Iterator[Lease]:
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + deadline_s
    with (folder / _FILE).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise _held_by_another(file.name, deadline_s) from error
                time.sleep(0.02)
        yield Lease(float("inf"))


@contextlib.contextmanager
def _claimed(folder: str, deadline_s: float, stale_s: float) -> Iterator[Lease]:
    claims, name = storage.join(folder, _FOLDER), uuid.uuid4().hex
    own = storage.join(claims, name)
    deadline = time.monotonic() + deadline_s
    while True:
        began = time.monotonic()
        storage.write_bytes(own, b"{}")
        if _living(claims, name, stale_s) == [name]:
            break
        storage.delete(own)
        if time.monotonic() > deadline:
            raise _held_by_another(claims, deadline_s)
        time.sleep(random.uniform(0.05, 0.4))
    try:
        yield Lease(began + min(_HELD_S, stale_s / 3))
    finally:
        storage.delete(own)


def _living(claims: str, own: str, stale_s: float) -> list[str]:
    """Names of the claims that count: those younger than `stale_s` when `own` was put, by the store's clock."""
    place = storage.locate(claims)
    found = place.filesystem.get_file_info(pafs.FileSelector(place.path, allow_not_found=True))
    times = {info.base_name: info.mtime_ns for info in found if info.type == pafs.FileType.File}
    now = times.get(own, 0)
    return sorted(name for name, put in times.items() if now - put < stale_s * 1e9)


def _held_by_another(what: str, deadline_s: float) -> InputError:
    return InputError(
        f"{what} is held by another publication for {deadline_s:g} s.",
        fix="End that job, or wait for it, and run this one again.",
    )
