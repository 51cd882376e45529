"""Published models: a folder a version, complete before the pointer names it.

models/<name>/versions/<v>/model.keras schema.yaml statistics.json metrics.json lineage.json
models/<name>/current.json      {"version": v, "before": [...], "withdrawn": [...], ...}, replaced in one step
"""

from __future__ import annotations

import datetime
import getpass
import json
import os
from dataclasses import dataclass
from typing import Any

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage
from dl_on_spark.registry.lease import Lease, lease

_LINEAGE = "lineage.json"
_CURRENT = "current.json"
_CLAIM = "claim.json"
_DEADLINE_S = 30.0  # the pointer moves within milliseconds on a disk, within some requests on an object store
_EVENTS = 200  # of the pointer's history are kept
_ANY = -1


@dataclass(frozen=True)
class Version:
    """One published version; ``lineage`` says which run, data, code and configuration made it."""

    number: int
    folder: str
    lineage: dict[str, Any]


@dataclass(frozen=True)
class Stages:
    """Which version is current, which were before, and which were left by a roll-back; ``history``: oldest first."""

    current: int | None
    before: tuple[int, ...]
    withdrawn: tuple[int, ...]
    history: tuple[dict[str, Any], ...]

    def back_to(self, known: list[int]) -> int | None:
        """Where a roll-back goes: the last version that was current and was not itself rolled back from.

        The one before by number is no answer: it may be the bad one that was left last week.
        """
        numbers = [n for n in known if self.current is not None and n < self.current and n not in self.withdrawn]
        return max((n for n in numbers if n in self.before), default=max(numbers, default=None))

    def stage(self, number: int, known: list[int]) -> str:
        """current; previous, which a roll-back goes to; withdrawn; superseded; waiting, which never was current."""
        if number == self.current:
            return "current"
        if number in self.withdrawn:
            return "withdrawn"
        if number == self.back_to(known):
            return "previous"
        return "superseded" if number in self.before else "waiting"


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
        return [self._version(number) for number in self.numbers()]

    def numbers(self) -> list[int]:
        """Numbers of the complete versions, in order."""
        folder = storage.join(self._root, "versions")
        return sorted(
            int(path.split("/")[0])
            for path in storage.list_files(folder)
            if path.endswith(f"/{_LINEAGE}") and path.split("/")[0].isdigit()
        )

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

    def version(self, number: int) -> Version:
        """One version. Raises `InputError` for a number that there is none of."""
        known = self.numbers()
        if number not in known:
            raise InputError(
                f"model {self._name!r} has no version {number}; it has {known}.",
                fix="Name one of these with --version.",
            )
        return self._version(number)

    def stages(self) -> Stages:
        """What each version is; empty before the first publication."""
        found = self._pointer()
        current = int(found["version"]) if found else None
        events = tuple(found.get("history", ()))
        return Stages(current, tuple(found.get("before", ())), tuple(found.get("withdrawn", ())), events)

    def roll_back(self, number: int | None = None, *, reason: str | None = None) -> Version:
        """Make version `number` (default: see `Stages.back_to`) the current one; what is left is withdrawn.

        A version that is newer than the current one is promoted.
        """
        stages = self.stages()  # not `current`: the way back must not need a whole current version
        if stages.current is None:
            raise InputError(f"model {self._name!r} has no version yet.", fix="Publish one first.")
        known = self.numbers()
        target = number if number is not None else stages.back_to(known)
        if target is None or target not in known:
            what = "earlier version" if target is None else f"version {target}"
            raise InputError(
                f"model {self._name!r} has no {what}; it has {known}, current is {stages.current}.",
                fix="Name one of these with --version.",
            )
        self._point(target, None, stages.current, "rollback" if target < stages.current else "promote", reason)
        return self._version(target)

    def retain(self, keep: int) -> list[int]:
        """Remove all but the last `keep` versions, the current one and the one a roll-back goes to.

        Returns the numbers removed. The lineage goes first, so that no half-removed version looks whole.
        """
        stages, known = self.stages(), self.numbers()
        kept = {*known[-max(keep, 1) :], stages.current, stages.back_to(known)}
        removed = [number for number in known if number not in kept]
        for number in removed:
            storage.delete(storage.join(self._folder(number), _LINEAGE))
            storage.delete(self._folder(number))
        return removed

    def _add(self, files: dict[str, bytes], lineage: dict[str, Any]) -> Version:
        number = self._claim()
        folder = self._folder(number)
        for name, data in files.items():
            storage.write_bytes(storage.join(folder, name), data)
        storage.write_bytes(storage.join(folder, _LINEAGE), json.dumps(lineage, indent=1, default=str).encode())
        storage.delete(storage.join(folder, _CLAIM))
        return Version(number, folder, lineage)

    def _claim(self) -> int:
        """A version number that no other publisher has; one that is left half-written keeps its number."""
        with lease(self._root, _DEADLINE_S) as held:
            folders = {path.split("/")[0] for path in storage.list_files(storage.join(self._root, "versions"))}
            number = max((int(name) for name in folders if name.isdigit()), default=0) + 1
            held.check()
            storage.write_bytes(storage.join(self._folder(number), _CLAIM), json.dumps({"by": _user()}).encode())
            return number

    def _point(
        self, number: int, forced: str | None, instead_of: int | None, why: str = "publish", reason: str | None = None
    ) -> None:
        with lease(self._root, _DEADLINE_S) as held:
            found = self._current_number()
            if instead_of != _ANY and found not in (instead_of, number):
                raise InputError(
                    f"version {found} of model {self._name!r} became current while version {number} was on its way.",
                    fix="Run the job again: it compares with that version.",
                )
            self._write_pointer(number, forced, why, reason, held)

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

    def _write_pointer(self, number: int, forced: str | None, why: str, reason: str | None, held: Lease) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        old = self._pointer()
        before = {*old.get("before", ()), *([old["version"]] if old else [])}
        withdrawn = set(old.get("withdrawn", ())) - {number}
        if why == "rollback":
            withdrawn.add(old["version"])
        history = list(old.get("history", ()))
        if not old or old["version"] != number:
            event = {"version": number, "at": now, "by": _user(), "what": why, "reason": forced or reason}
            history.append(event)
        pointer = {
            "version": number,
            "since": now,
            "by": _user(),
            "forced": forced,
            "before": sorted(before),
            "withdrawn": sorted(withdrawn),
            "history": history[-_EVENTS:],
        }
        held.check()
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
