"""Checkpoints: a folder a step, complete once its manifest is there.

    checkpoints/step-00000128-a001/model.safetensors      weights, by rank 0
                                  /rank-0000.safetensors  what differs from rank to rank
                                  /manifest.json          sizes and SHA-256 of the files; written last

Only whole files are put, nothing is renamed or changed, so an object store serves as well as a disk. The
attempt's number is in the folder's name and is compared with the run's current attempt before the
manifest is written: a worker of an earlier attempt that wakes up cannot commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
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
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})-a(\d{3,})")

Tensors = Mapping[str, npt.NDArray[Any]]


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
    """A complete checkpoint whose files were verified."""

    folder: str
    manifest: Manifest

    def load(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Tensors of one file; raises `CheckpointError` when it is not what the manifest says."""
        digest = next((file for file in self.manifest.files if file.name == name), None)
        if digest is None:
            raise CheckpointError(f"{self.folder} has no file {name}.", fix="Resume from another checkpoint.")
        return _read(self.folder, digest)

    def load_rank(self, rank: int) -> dict[str, npt.NDArray[Any]]:
        """What `rank` saved; with more ranks than then, rank k takes that of k modulo the old number."""
        return self.load(rank_file(rank % self.manifest.world_size))


class CheckpointStore:
    """The checkpoints of one run folder, written by one attempt."""

    def __init__(self, run_folder: str, attempt: int, current_attempt: Callable[[], int]) -> None:
        self._root = storage.join(run_folder, "checkpoints")
        self._attempt = attempt
        self._current_attempt = current_attempt

    def put(self, step: int, name: str, tensors: Tensors) -> FileDigest:
        """Write one file of the checkpoint of `step`."""
        data = safetensors.save({key: np.asarray(value, order="C") for key, value in tensors.items()})
        storage.write_bytes(storage.join(self._folder(step), name), data)
        return FileDigest(name, len(data), hashlib.sha256(data).hexdigest())

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint complete. Raises `CheckpointError` when a later attempt runs."""
        current = self._current_attempt()
        if current != self._attempt:
            raise CheckpointError(
                f"attempt {self._attempt} is stale: attempt {current} of this run is at work.",
                fix="Nothing to do: this worker ends, the later attempt goes on.",
            )
        text = json.dumps(asdict(manifest), indent=1)
        storage.write_bytes(storage.join(self._folder(manifest.step), _MANIFEST), text.encode())

    def latest(self) -> Checkpoint | None:
        """The complete, undamaged checkpoint that is furthest; damaged ones are named in the log."""
        for folder in self._folders():
            try:
                return self.verify(folder)
            except CheckpointError as error:
                logger.warning("%s Falling back to the checkpoint before it.", error.message)
        return None

    def verify(self, folder: str) -> Checkpoint:
        """The checkpoint in `folder`, every file checked against the manifest."""
        place = storage.join(self._root, folder)
        manifest = _manifest_of(place)
        for digest in manifest.files:
            _check(place, digest)
        return Checkpoint(place, manifest)

    def prune(self, keep: int, best: Callable[[Manifest], float] | None = None) -> None:
        """Keep the last `keep` complete checkpoints and the one for which `best` is greatest."""
        folders = self._folders()
        kept = set(folders[:keep])
        if best is not None and folders:
            known = [(best(_manifest_of(storage.join(self._root, folder))), folder) for folder in folders]
            kept.add(max(known)[1])
        for folder in folders:
            if folder not in kept:
                # The manifest first: a half-deleted checkpoint must not look complete.
                storage.delete(storage.join(self._root, folder, _MANIFEST))
                storage.delete(storage.join(self._root, folder))

    def _folder(self, step: int) -> str:
        return storage.join(self._root, f"step-{step:08d}-a{self._attempt:03d}")

    def _folders(self) -> list[str]:
        """Names of complete checkpoints, furthest first."""
        names = {path.split("/")[0] for path in storage.list_files(self._root) if path.endswith(f"/{_MANIFEST}")}
        found = [(match, name) for name in names if (match := _NAME.fullmatch(name))]
        ordered = sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])), reverse=True)
        return [name for _, name in ordered]


def rank_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank-{rank:04d}.safetensors"


def _manifest_of(place: str) -> Manifest:
    try:
        data = json.loads(storage.read_bytes(storage.join(place, _MANIFEST)))
        if data["format"] > FORMAT:
            raise CheckpointError(
                f"{place} has checkpoint format {data['format']}; this version reads up to {FORMAT}.",
                fix="Resume with the newer dl_on_spark that wrote it.",
            )
        files = tuple(FileDigest(**file) for file in data.pop("files"))
        return Manifest(**{**data, "cursor": Cursor(**data["cursor"]), "files": files})
    except (OSError, ValueError, KeyError, TypeError) as error:
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
