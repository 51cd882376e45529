"""One run folder has one trainer: a lock whose holder proves by heartbeat that it lives.

``lock.json`` says who holds the run (host, process, since when) and has a counter that the holder raises every few
seconds. A second trainer never compares clocks: it watches whether the counter moves. A holder on the same machine
is looked up among the processes instead, so what a killed driver leaves is taken over at once.

Whole files are put and read, nothing is renamed or appended, so an object store serves as well as a disk. Such a
store has no exclusive creation: of two that begin in the same moment the later put wins, and the other one sees
that before it begins the run, or at its next heartbeat. Fencing (`run_folder.Attempt`) keeps the one that lost from
committing anything.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dl_on_spark.errors import CheckpointError, ConfigError, TrainingFailed
from dl_on_spark.lake import storage
from dl_on_spark.training.run_folder import RunFolder, remove_empty

logger = logging.getLogger(__name__)

_LOCK = "lock.json"
HEARTBEAT_S = 5.0
# As many heartbeats may be late, on a busy driver or a slow store, before a holder counts as dead.
_LATE = 6
_JOIN_S = 30.0
_held_here: set[str] = set()  # tokens of the locks that this process holds


@dataclass(frozen=True)
class Holder:
    """Content of lock.json. ``machine`` and ``started`` tell a process from another one of the same number."""

    token: str
    host: str
    pid: int
    since: str
    machine: str
    started: str
    beat: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """Holds the run of `folder` while it is open; use it in ``with``.

    ``heartbeat_s``: seconds between two signs of life; a holder without any for six of them is dead. Entering
    raises `ConfigError` where another trainer holds the run: nothing has been changed then.
    """

    def __init__(self, folder: RunFolder, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._folder, self._heartbeat_s = folder, heartbeat_s
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        self._own = Holder(uuid.uuid4().hex, socket.gethostname(), pid, now, _machine(), _started(pid), 0)
        self._made: list[Path] = []  # folders that are there for the lock only, until the run begins
        self._taken_by: Holder | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> Self:
        holder = self._read()
        if holder is not None and self._alive(holder):
            raise self._refusal(holder)
        self._made = self._folder.missing()
        _held_here.add(self._own.token)
        try:
            self._write(0)
        except BaseException:
            _held_here.discard(self._own.token)
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)
        _held_here.discard(self._own.token)
        try:
            holder = self._read()
            if holder is not None and holder.token == self._own.token:
                storage.delete(self._folder.path(_LOCK))
            remove_empty(self._made)
        except OSError as problem:
            logger.warning("%s cannot be removed (%s): it expires by itself.", self._folder.path(_LOCK), problem)

    def check_alone(self) -> None:
        """The run is about to begin. Raises `ConfigError` where another trainer began in the same moment."""
        holder = self._read()
        if holder is not None and holder.token != self._own.token:
            raise self._refusal(holder)

    def check_held(self) -> None:
        """Raise `TrainingFailed` where another trainer has taken the run over meanwhile; reads nothing."""
        if self._taken_by is not None:
            raise TrainingFailed(
                f"another trainer has taken over the run in {self._folder.uri} ({self._taken_by}); this one stops.",
                fix="Wait for the other one, or give each run its own checkpoint_dir.",
            )

    def _alive(self, holder: Holder) -> bool:
        if holder.machine and holder.machine == self._own.machine:
            if holder.pid == self._own.pid:
                return holder.token in _held_here
            return _started(holder.pid) == holder.started
        patience_s = _LATE * self._heartbeat_s
        logger.warning("%s: held by %s; waiting up to %g s for a sign of life.", self._folder.uri, holder, patience_s)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            time.sleep(min(1.0, self._heartbeat_s))
            now = self._read()
            if now is None:
                return False
            if now != holder:
                return True
        return False

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(self._heartbeat_s):
            beat += 1
            try:
                holder = self._read()
                if holder is not None and holder.token != self._own.token:
                    self._taken_by = holder
                    return
                self._write(beat)
            except (OSError, CheckpointError) as error:
                logger.warning("the lock of %s cannot be renewed (%s).", self._folder.uri, error)

    def _read(self) -> Holder | None:
        """The holder; None where there is none, or a file that nobody who lives can have written."""
        data = self._folder.read(_LOCK)
        try:
            return None if data is None else Holder(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def _write(self, beat: int) -> None:
        text = json.dumps({**asdict(self._own), "beat": beat})
        self._folder.write(_LOCK, text)

    def _refusal(self, holder: Holder) -> ConfigError:
        return ConfigError(
            f"the run in {self._folder.uri} is being trained by {holder}: one run has one trainer.",
            fix="Wait for it or end that process; or give this run a checkpoint_dir of its own.",
        )


def _machine() -> str:
    """This boot of this machine and its process numbers' namespace; "" where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When the process began, in ticks since the boot; "" where there is none, or it has ended and is not reaped."""
    try:
        # The name in brackets may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
