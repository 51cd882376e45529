"""The folder of one training run: who it is, which attempt runs, what happened, what came out.

run.json            which run this is: identity (data, schema, strategy, seed, model), plan, epochs
lock.json           who trains it now, see `run_lock`
attempt.json        the current attempt; older attempts cannot commit checkpoints
events.jsonl        what happened, a JSON object a line
checkpoints/        see `checkpoint`
schema.yaml statistics.json snapshot.json      what the model was trained with
stages.open         the attempt whose processes may get more orders (`StageAveraging`), while it trains
model.keras result.json                        there when the run has finished
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dl_on_spark.errors import CheckpointError, ConfigError, InputError
from dl_on_spark.lake import Statistics, storage
from dl_on_spark.training.result import TrainingResult

_RUN, _ATTEMPT, _EVENTS, _RESULT = "run.json", "attempt.json", "events.jsonl", "result.json"
_STATISTICS = "statistics.json"
STAGES_OPEN = "stages.open"
_PROBE_BYTES = 64 * 1024
# run.json first: a folder that is cleared halfway holds no run.
_OF_THE_RUN = (_RUN, _RESULT, "model.keras", "checkpoints", "schema.yaml", _STATISTICS, "snapshot.json")


@dataclass(frozen=True)
class RunRecord:
    """Content of run.json.

    ``identity``: what must be equal for the run to be continued. ``plan``: JSON of its `SamplePlan`.
    ``epochs``: as last asked for. ``id``: tells this run from another one of equal identity.
    """

    identity: dict[str, Any]
    plan: str
    epochs: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def to_json(self) -> str:
        """All of the record as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> RunRecord:
        """The record that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Attempt:
    """One try of a run. Two drivers may take the same number at once; the token tells them apart."""

    number: int
    token: str


class RunFolder:
    """Reads and writes the run's small files; driver and workers hold one each."""

    def __init__(self, uri: str) -> None:
        # Absolute, since workers run in folders of their own.
        local = storage.local_path(uri)
        self.uri = uri.rstrip("/") if local is None else str(local)

    def path(self, name: str) -> str:
        """Address of a file in the folder."""
        return storage.join(self.uri, name)

    def check_writable(self) -> None:
        """Raise `InputError` unless files can be written here; leaves nothing behind."""
        fresh = self.missing()
        probe = self.path(f".probe-{uuid.uuid4().hex[:8]}")
        try:
            storage.write_bytes(probe, bytes(_PROBE_BYTES))  # a full disk still takes an empty file
            storage.delete(probe)
        except OSError as error:
            raise InputError(
                f"checkpoint_dir {self.uri} cannot be written ({error}).",
                fix="Choose a folder that driver and executors can write, or mend its permissions.",
            ) from error
        finally:
            remove_empty(fresh)

    def missing(self) -> list[Path]:
        """Local folders, the run's own first, that the first file written here would make."""
        local = storage.local_path(self.uri)
        return [] if local is None else [folder for folder in (local, *local.parents) if not folder.exists()]

    def read(self, name: str) -> bytes | None:
        """Content of a file; None where there is none."""
        try:
            return storage.read_bytes(self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file, complete or not at all. Raises `CheckpointError`."""
        with self._written(name):
            storage.write_bytes(self.path(name), data.encode() if isinstance(data, str) else data)

    def result(self) -> TrainingResult | None:
        """The finished run's result. Raises `ConfigError` when it cannot be read."""
        data = self.read(_RESULT)
        try:
            return None if data is None else TrainingResult.from_json(data)
        except (ValueError, TypeError) as error:
            raise self._damaged(_RESULT, error) from error

    def statistics(self) -> Statistics | None:
        """Those of the run that the folder holds; None where they are damaged: the same rows give them again."""
        data = self.read(_STATISTICS)
        try:
            return None if data is None else Statistics.from_json(data.decode())
        except (ValueError, TypeError, KeyError):
            return None

    def record(self) -> RunRecord | None:
        """The run that the folder holds. Raises `ConfigError` when its record cannot be read."""
        data = self.read(_RUN)
        try:
            return None if data is None else RunRecord.from_json(data)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.path(_RUN)} cannot be read ({error}).",
                fix="Use another checkpoint_dir, or resume='never' to replace that run.",
            ) from error

    def holds(self, record: RunRecord) -> bool:
        """Whether the workers have begun this very run."""
        try:
            found = self.record()
        except ConfigError:
            return False
        return found is not None and found.id == record.id

    def begin(self, record: RunRecord, files: Mapping[str, str]) -> None:
        """Make the folder that of `record`'s run: what another run left is removed, `files` are written.

        Called when nothing can be refused any more, since until then the other run stays as it is.
        """
        # Without its result a run that goes on for more epochs is not finished.
        for name in (_RESULT,) if self.holds(record) else _OF_THE_RUN:
            storage.delete(self.path(name))
        for name, text in files.items():
            self.write(name, text)
        self.write(_RUN, record.to_json())

    def next_attempt(self) -> Attempt:
        """Take over: the attempts before can no longer commit."""
        found = self.current_attempt()
        attempt = Attempt(1 if found is None else found.number + 1, uuid.uuid4().hex)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
        self.write(_ATTEMPT, json.dumps({"attempt": attempt.number, "token": attempt.token, **owner}))
        return attempt

    def current_attempt(self) -> Attempt | None:
        """The attempt that may commit; None before the first. Raises `ConfigError` when its file cannot be read."""
        data = self.read(_ATTEMPT)
        if data is None:
            return None
        try:
            found = json.loads(data)
            return Attempt(int(found["attempt"]), str(found.get("token", "")))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(_ATTEMPT, error) from error

    def is_current(self, attempt: Attempt) -> bool:
        """Whether `attempt` may still commit."""
        return self.current_attempt() == attempt

    def give_up(self, attempt: Attempt) -> None:
        """Leave no trace of `attempt` in a folder where no run has begun."""
        if self.read(_RUN) is not None or not self.is_current(attempt):
            return
        for name in (_ATTEMPT, _EVENTS):
            storage.delete(self.path(name))

    def event(self, kind: str, **fields: Any) -> None:
        """Add a line to events.jsonl."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": kind, **fields}, default=str) + "\n"
        local = storage.local_path(self.path(_EVENTS))
        if local is not None:
            with self._written(_EVENTS), Path(local).open("a", encoding="utf-8") as file:
                file.write(line)
            return
        # An object store has no append: the whole small file is put again.
        self.write(_EVENTS, (self.read(_EVENTS) or b"") + line.encode())

    def _damaged(self, name: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path(name)} cannot be read ({error}).",
            fix="Remove that file: the same command then goes on from the last checkpoint.",
        )

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path(name)} cannot be written ({error}).",
                fix="Mend the folder's permissions or make room on its disk; the same command resumes the run.",
            ) from error


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of `folders` that are there and empty."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
