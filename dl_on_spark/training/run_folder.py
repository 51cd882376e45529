"""The folder of one training run: who it is, which attempt runs, what happened, what came out.

run.json            identity (data, schema, plan, strategy, seed, model) and plan
attempt.json        number of the current attempt; older attempts cannot commit checkpoints
events.jsonl        what happened, a JSON object a line
checkpoints/        see `checkpoint`
schema.yaml statistics.json snapshot.json      what the model was trained with
model.keras result.json                        there when the run has finished
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage
from dl_on_spark.training.result import TrainingResult

_PARTS = ("run.json", "attempt.json", "events.jsonl", "schema.yaml", "statistics.json", "snapshot.json")


class RunFolder:
    """Reads and writes the run's small files; the driver holds it, workers read the attempt."""

    def __init__(self, uri: str) -> None:
        # Absolute, since workers run in folders of their own.
        local = storage.local_path(uri)
        self.uri = uri.rstrip("/") if local is None else str(local)

    def path(self, name: str) -> str:
        """Address of a file in the folder."""
        return storage.join(self.uri, name)

    def check_writable(self) -> None:
        """Raise `InputError` unless files can be written here; leaves nothing behind."""
        local = storage.local_path(self.uri)
        fresh = [] if local is None else [folder for folder in (local, *local.parents) if not folder.exists()]
        probe = self.path(f".probe-{uuid.uuid4().hex[:8]}")
        try:
            storage.write_bytes(probe, b"")
            storage.delete(probe)
        except OSError as error:
            raise InputError(
                f"checkpoint_dir {self.uri} cannot be written ({error}).",
                fix="Choose a folder that driver and executors can write, or mend its permissions.",
            ) from error
        finally:
            for folder in fresh:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()

    def read(self, name: str) -> bytes | None:
        """Content of a file; None where there is none."""
        try:
            return storage.read_bytes(self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file, complete or not at all."""
        storage.write_bytes(self.path(name), data.encode() if isinstance(data, str) else data)

    def read_json(self, name: str) -> Any:
        """Content of a JSON file; None where there is none."""
        data = self.read(name)
        return None if data is None else json.loads(data)

    def result(self) -> TrainingResult | None:
        """The finished run's result."""
        data = self.read("result.json")
        return None if data is None else TrainingResult.from_json(data)

    def current_attempt(self) -> int:
        """Number of the attempt that may commit."""
        found = self.read_json("attempt.json")
        return 0 if found is None else int(found["attempt"])

    def next_attempt(self) -> int:
        """Take over: the attempts before can no longer commit."""
        attempt = self.current_attempt() + 1
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        owner = {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid(), "since": now}
        self.write("attempt.json", json.dumps(owner))
        return attempt

    def event(self, kind: str, **fields: Any) -> None:
        """Add a line to events.jsonl."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": kind, **fields}, default=str) + "\n"
        local = storage.local_path(self.path("events.jsonl"))
        if local is not None:
            with Path(local).open("a", encoding="utf-8") as file:
                file.write(line)
            return
        # An object store has no append: the whole small file is put again.
        self.write("events.jsonl", (self.read("events.jsonl") or b"") + line.encode())

    def clear(self) -> None:
        """Remove what an earlier run left, its checkpoints included."""
        for name in ("result.json", "model.keras", *_PARTS, "checkpoints"):
            storage.delete(self.path(name))
        local = storage.local_path(self.uri)
        if local is not None and local.is_dir() and not any(local.iterdir()):
            local.rmdir()
