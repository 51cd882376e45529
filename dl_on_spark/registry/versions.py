"""Published models: a folder a version, complete before the pointer names it.

models/<name>/versions/<v>/model.keras schema.yaml statistics.json metrics.json lineage.json
models/<name>/current.json      {"version": v, "before": [...], ...}, replaced in one step
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage

_LINEAGE = "lineage.json"
_CURRENT = "current.json"
_LOCK = ".current.lock"
_LOCK_DEADLINE_S = 30.0  # the pointer moves within milliseconds
_ANY = -1


@dataclass(frozen=True)
class Version:
    """One published version; ``lineage`` says which run, data, code and configuration made it."""

    number: int
    folder: str
    lineage: dict[str, Any]


class Registry:
    """The versions of one model."""

    def __init__(self, root: str, name: str) -> None:
        self._name = name
        self._root = storage.join(root, name)

    def publish(self, files: dict[str, bytes], lineage: dict[str, Any], *, instead_of: int | None = _ANY) -> Version:
        """Add a version and make it current; publishing the same model again gives the same version.

        ``lineage["model_sha256"]`` identifies the model. The lineage file is written last: a version without
        it is not complete and never becomes current. ``instead_of``: the version (None: no version) that the
        gate compared the model with. Raises `InputError` when another one became current meanwhile: then
        the pointer stays, and of two publishers one wins. Raises it too for a version that was current once
        and is no more: a job that is run again undoes no rollback.
        """
        same = [v for v in self.versions() if v.lineage["model_sha256"] == lineage["model_sha256"]]
        version = same[-1] if same else self._add(files, lineage)
        pointer = self._pointer()
        if version.number in pointer.get("before", ()) and version.number != pointer["version"]:
            raise InputError(
                f"this model is version {version.number} of {self._name!r}, which was current before version "
                f"{pointer['version']} is.",
                fix=f"To go back to it: dl-on-spark rollback --version {version.number}.",
            )
        self._point(version.number, lineage.get("forced"), instead_of)
        return version

    def check_writable(self) -> None:
        """Raise `InputError` where versions cannot be added; makes nothing."""
        local = storage.local_path(self._root)
        if local is None:
            return
        there = next(folder for folder in (local, *local.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise InputError(
                f"registry {self._root} cannot be written ({there}).",
                fix="Choose another `registry`, or mend its permissions.",
            )

    def versions(self) -> list[Version]:
        """Complete versions, oldest first."""
        folder = storage.join(self._root, "versions")
        numbers = sorted(
            int(path.split("/")[0])
            for path in storage.list_files(folder)
            if path.endswith(f"/{_LINEAGE}") and path.split("/")[0].isdigit()
        )
        return [self._version(number) for number in numbers]

    def current(self) -> Version | None:
        """The version that scoring uses; None before the first publication."""
        number = self._current_number()
        if number is None:
            return None
        try:
            return self._version(number)
        except FileNotFoundError as error:
            raise InputError(
                f"version {number} of model {self._name!r} is current, but its folder is not whole ({error}).",
                fix="Go back to a whole one: dl-on-spark rollback.",
            ) from error

    def roll_back(self, number: int | None = None) -> Version:
        """Make version `number` (default: the one before the current) the current one."""
        current = self._current_number()  # not `current`: the way back must not need a whole current version
        if current is None:
            raise InputError(f"model {self._name!r} has no version yet.", fix="Publish one first.")
        known = [version.number for version in self.versions()]
        earlier = [n for n in known if n < current]
        target = number if number is not None else (earlier[-1] if earlier else None)
        if target is None or target not in known:
            what = "earlier version" if target is None else f"version {target}"
            raise InputError(
                f"model {self._name!r} has no {what}; it has {known}, current is {current}.",
                fix="Name one of these with --version.",
            )
        self._point(target, None, current)
        return self._version(target)

    def _add(self, files: dict[str, bytes], lineage: dict[str, Any]) -> Version:
        number = self._claim()
        folder = self._folder(number)
        for name, data in files.items():
            storage.write_bytes(storage.join(folder, name), data)
        storage.write_bytes(storage.join(folder, _LINEAGE), json.dumps(lineage, indent=1, default=str).encode())
        return Version(number, folder, lineage)

    def _claim(self) -> int:
        """A version number that no other publisher has: the making of its folder decides.

        An object store has no such step: there, publish a model from one place at a time.
        """
        folders = {path.split("/")[0] for path in storage.list_files(storage.join(self._root, "versions"))}
        number = max((int(name) for name in folders if name.isdigit()), default=0) + 1
        while True:
            local = storage.local_path(self._folder(number))
            if local is None:
                return number
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                local.mkdir()
                return number
            except FileExistsError:
                number += 1

    def _point(self, number: int, forced: str | None, instead_of: int | None) -> None:
        with self._pointer_lock():
            found = self._current_number()
            if instead_of != _ANY and found not in (instead_of, number):
                raise InputError(
                    f"version {found} of model {self._name!r} became current while version {number} was on its way.",
                    fix="Run the job again: it compares with that version.",
                )
            self._write_pointer(number, forced)

    @contextlib.contextmanager
    def _pointer_lock(self) -> Iterator[None]:
        """One process at a time on a file system; the kernel frees the lock of one that dies.

        An object store has none: there, publish a model from one place at a time.
        """
        import fcntl

        local = storage.local_path(self._root)
        if local is None:
            yield
            return
        local.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_DEADLINE_S
        with (local / _LOCK).open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise InputError(
                            f"{file.name} is held by another publication for {_LOCK_DEADLINE_S:g} s.",
                            fix="End that job, or wait for it, and run this one again.",
                        ) from error
                    time.sleep(0.02)
            yield

    def _current_number(self) -> int | None:
        found = self._pointer()
        return int(found["version"]) if found else None

    def _pointer(self) -> dict[str, Any]:
        """The pointer's file; empty before the first publication."""
        try:
            found: dict[str, Any] = json.loads(storage.read_bytes(storage.join(self._root, _CURRENT)))
            int(found["version"])
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{storage.join(self._root, _CURRENT)} is damaged ({error}).",
                fix='Write the number of a version in it: {"version": 1}.',
            ) from error
        return found

    def _write_pointer(self, number: int, forced: str | None) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        old = self._pointer()
        before = {*old.get("before", ()), *([old["version"]] if old else [])}
        pointer = {"version": number, "since": now, "by": _user(), "forced": forced, "before": sorted(before)}
        storage.write_bytes(storage.join(self._root, _CURRENT), json.dumps(pointer).encode())

    def _version(self, number: int) -> Version:
        file = storage.join(self._folder(number), _LINEAGE)
        try:
            lineage = json.loads(storage.read_bytes(file))
            lineage["model_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{file} is damaged ({error}).", fix="Restore it, or move that version's folder out of the registry."
            ) from error
        return Version(number, self._folder(number), lineage)

    def _folder(self, number: int) -> str:
        return storage.join(self._root, "versions", str(number))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
