"""Checkpoints: a folder a step, complete once its manifest is there.

    checkpoints/step-00000128-a001/model.safetensors      weights, by rank 0
                                  /rank-0000.safetensors  what differs from rank to rank
                                  /manifest.json          sizes and SHA-256 of the files; written last

Only whole files are put, nothing is renamed or changed, so an object store serves as well as a disk. The
attempt's number is in the folder's name, and before the manifest is written the run is asked whether that
attempt is still at work: a worker of an earlier attempt that wakes up cannot commit.

The manifest carries the SHA-256 of its own content, in this format and all later ones: a damaged manifest
is told from one of a newer version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from dl_on_spark.errors import CheckpointError
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.lake import storage

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL = "model.safetensors"
_ENDING = ".safetensors"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})-a(\d{3,})")

_SEAL = "sha256"

Tensors = Mapping[str, npt.NDArray[Any]]


class _NewerFormat(CheckpointError):
    """Not damaged, so never a reason to fall back to an older checkpoint."""


@dataclass(frozen=True)
class FileDigest:
    """One file of a checkpoint as it was put: name, bytes and SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint holds.

    ``step``: optimizer steps done over all epochs. ``cursor``: the next step. ``progress``: what the run
    has recorded so far (history, rows, bytes), as plain values.
    """

    step: int
    cursor: Cursor
    attempt: int
    world_size: int
    files: tuple[FileDigest, ...]
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; each file is verified when it is loaded."""

    folder: str
    manifest: Manifest

    def load(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Tensors of one file, whichever task wrote it; raises `CheckpointError` unless it is as the manifest says."""
        start = name.removesuffix(_ENDING)
        digest = next((file for file in self.manifest.files if file.name.startswith((f"{start}.", f"{start}-t"))), None)
        if digest is None:
            raise CheckpointError(f"{self.folder} has no file {name}.", fix="Resume from another checkpoint.")
        return _read(self.folder, digest)

    def load_rank(self, rank: int) -> dict[str, npt.NDArray[Any]]:
        """What `rank` saved; with more ranks than then, rank k takes that of k modulo the old number."""
        return self.load(rank_file(rank % self.manifest.world_size))


class CheckpointStore:
    """The checkpoints of one run folder, written by one attempt.

    ``is_current``: whether `attempt` is still the run's; asked before anything is committed.
    """

    def __init__(self, run_folder: str, attempt: int, is_current: Callable[[], bool]) -> None:
        self._root = storage.join(run_folder, "checkpoints")
        self._attempt = attempt
        self._is_current = is_current

    def fence(self) -> None:
        """Raise `CheckpointError` when a later attempt has taken over the run."""
        if not self._is_current():
            raise CheckpointError(
                f"attempt {self._attempt} is stale: a later attempt of this run is at work.",
                fix="Nothing to do: this worker ends, the later attempt goes on.",
            )

    def put(self, step: int, name: str, tensors: Tensors) -> FileDigest:
        """Write one file of the checkpoint of `step`."""
        data = safetensors.save({key: np.asarray(value, order="C") for key, value in tensors.items()})
        _write(storage.join(self._folder(step), name), data)
        return FileDigest(name, len(data), hashlib.sha256(data).hexdigest())

    def name(self, step: int) -> str:
        """The checkpoint of `step`, as `open` takes it."""
        return f"step-{step:08d}-a{self._attempt:03d}"

    def get(self, step: int, digest: FileDigest) -> dict[str, npt.NDArray[Any]]:
        """Tensors of a file that `put` wrote in this attempt."""
        return _read(self._folder(step), digest)

    def drop(self, step: int, names: Iterable[str]) -> None:
        """Remove files of a checkpoint that its manifest does not name."""
        for name in names:
            storage.delete(storage.join(self._folder(step), name))

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint complete. Raises `CheckpointError` when a later attempt is at work."""
        self.fence()
        place = storage.join(self._folder(manifest.step), _MANIFEST)
        _write(place, _sealed(manifest))
        try:  # again: a worker that was stopped after the first look may have woken up long after
            self.fence()
        except CheckpointError:
            storage.delete(place)
            raise

    def latest(self) -> Checkpoint | None:
        """The complete, undamaged checkpoint that is furthest; damaged ones are named in the log.

        Raises `CheckpointError` for one of a newer format.
        """
        folders = self.names()
        for folder in folders:
            try:
                return self.verify(folder)
            except _NewerFormat:
                raise
            except CheckpointError as error:
                logger.warning("%s Falling back to the checkpoint before it.", error.message)
        if folders:
            logger.warning("%s holds no undamaged checkpoint: the run starts from its beginning.", self._root)
        return None

    def verify(self, folder: str) -> Checkpoint:
        """The checkpoint in `folder`, every file checked against the manifest."""
        checkpoint = self.open(folder)
        for digest in checkpoint.manifest.files:
            _check(checkpoint.folder, digest)
        return checkpoint

    def open(self, folder: str) -> Checkpoint:
        """The checkpoint in `folder`, of which only the manifest has been read."""
        place = storage.join(self._root, folder)
        return Checkpoint(place, _manifest_of(place))

    def prune(self, keep: int, best: Callable[[Manifest], float] | None = None, *, verify: bool = False) -> None:
        """Keep the last `keep` complete checkpoints and the one for which `best` is greatest.

        What earlier attempts left incomplete goes too; what this attempt is writing stays. `verify`: read every
        file, so that a damaged checkpoint counts as incomplete.
        """
        complete: dict[str, Manifest] = {}
        for folder in self.names():
            try:
                complete[folder] = (self.verify if verify else self.open)(folder).manifest
            except CheckpointError as error:
                logger.warning("%s It counts as incomplete.", error.message)
        kept = set(list(complete)[:keep])
        if best is not None and complete:
            kept.add(max(complete, key=lambda folder: best(complete[folder])))  # among equals the furthest
        for folder, (_, attempt) in self._found().items():
            if folder not in kept and (folder in complete or attempt < self._attempt):
                # The manifest first: a half-deleted checkpoint must not look complete.
                storage.delete(storage.join(self._root, folder, _MANIFEST))
                storage.delete(storage.join(self._root, folder))

    def names(self, *, complete: bool = True) -> list[str]:
        """Folders of the checkpoints, furthest first; ``complete=False``: also of those without a manifest."""
        found = self._found(f"/{_MANIFEST}" if complete else "")
        return sorted(found, key=lambda name: found[name], reverse=True)

    def _folder(self, step: int) -> str:
        return storage.join(self._root, self.name(step))

    def _found(self, ending: str = "") -> dict[str, tuple[int, int]]:
        """(step, attempt) of the folders that have a file whose path ends so."""
        names = {path.split("/")[0] for path in storage.list_files(self._root) if path.endswith(ending)}
        return {name: (int(match[1]), int(match[2])) for name in names if (match := _NAME.fullmatch(name))}


def rank_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank-{rank:04d}{_ENDING}"


def of_task(name: str, task: int) -> str:
    """`name` as one of several tasks writes it, of which one will count."""
    return f"{name.removesuffix(_ENDING)}-t{task}{_ENDING}"


def _write(path: str, data: bytes) -> None:
    try:
        storage.write_bytes(path, data)
    except OSError as error:
        fix = "Mend the folder's permissions or make room on its disk; the same command resumes the run."
        raise CheckpointError(f"{path} cannot be written ({error}).", fix=fix) from error


def _sealed(manifest: Manifest) -> bytes:
    content = asdict(manifest)
    return json.dumps({**content, _SEAL: _seal(content)}, indent=1).encode()


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifest_of(place: str) -> Manifest:
    try:
        data = json.loads(storage.read_bytes(storage.join(place, _MANIFEST)))
        if data.pop(_SEAL) != _seal(data):
            raise ValueError("its content does not match its checksum")
        if data["format"] > FORMAT:
            raise _NewerFormat(
                f"{place} has checkpoint format {data['format']}; this version reads up to {FORMAT}.",
                fix="Resume with the newer dl_on_spark that wrote it.",
            )
        files = tuple(FileDigest(**file) for file in data.pop("files"))
        return Manifest(**{**data, "cursor": Cursor(**data["cursor"]), "files": files})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place}/{_MANIFEST} cannot be read ({error}).", fix="Remove that folder.") from error


def _check(place: str, digest: FileDigest) -> bytes:
    path = storage.join(place, digest.name)
    if "/" in digest.name or digest.name.startswith("."):
        raise CheckpointError(f"{place}: the manifest names the file {digest.name!r}.", fix="Remove that folder.")
    try:
        data = storage.read_bytes(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}).", fix="Remove that folder.") from error
    if len(data) != digest.size or hashlib.sha256(data).hexdigest() != digest.sha256:
        raise CheckpointError(
            f"{path} is damaged: it has {len(data)} bytes that do not match its checksum ({digest.size} bytes).",
            fix="Remove that folder.",
        )
    return data


def _read(place: str, digest: FileDigest) -> dict[str, npt.NDArray[Any]]:
    try:
        tensors: dict[str, npt.NDArray[Any]] = safetensors.load(_check(place, digest))
        return tensors
    except SafetensorError as error:
        raise CheckpointError(
            f"{place}/{digest.name} is no tensor file ({error}).", fix="Remove that folder."
        ) from error
