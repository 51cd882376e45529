"""Published models: a folder a version, complete before the pointer names it.

models/<name>/versions/<v>/model.keras schema.yaml statistics.json metrics.json lineage.json
models/<name>/current.json      {"version": v, ...}, replaced in one step
"""

from __future__ import annotations

import datetime
import getpass
import json
from dataclasses import dataclass
from typing import Any

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage

_LINEAGE = "lineage.json"
_CURRENT = "current.json"


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

    def publish(self, files: dict[str, bytes], lineage: dict[str, Any]) -> Version:
        """Add a version and make it current; publishing the same model again gives the same version.

        ``lineage["model_sha256"]`` identifies the model. The lineage file is written last: a version without
        it is not complete and never becomes current.
        """
        same = [v for v in self.versions() if v.lineage["model_sha256"] == lineage["model_sha256"]]
        version = same[-1] if same else self._add(files, lineage)
        self._point(version.number, lineage.get("forced"))
        return version

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
        try:
            pointer = json.loads(storage.read_bytes(storage.join(self._root, _CURRENT)))
        except FileNotFoundError:
            return None
        return self._version(int(pointer["version"]))

    def roll_back(self, number: int | None = None) -> Version:
        """Make version `number` (default: the one before the current) the current one."""
        current = self.current()
        if current is None:
            raise InputError(f"model {self._name!r} has no version yet.", fix="Publish one first.")
        known = [version.number for version in self.versions()]
        earlier = [n for n in known if n < current.number]
        target = number if number is not None else (earlier[-1] if earlier else None)
        if target is None or target not in known:
            what = "earlier version" if target is None else f"version {target}"
            raise InputError(
                f"model {self._name!r} has no {what}; it has {known}, current is {current.number}.",
                fix="Name one of these with --version.",
            )
        self._point(target, None)
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

    def _point(self, number: int, forced: str | None) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        pointer = {"version": number, "since": now, "by": _user(), "forced": forced}
        storage.write_bytes(storage.join(self._root, _CURRENT), json.dumps(pointer).encode())

    def _version(self, number: int) -> Version:
        lineage = json.loads(storage.read_bytes(storage.join(self._folder(number), _LINEAGE)))
        return Version(number, self._folder(number), lineage)

    def _folder(self, number: int) -> str:
        return storage.join(self._root, "versions", str(number))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
