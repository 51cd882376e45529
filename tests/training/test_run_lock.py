"""One run has one trainer: others are refused by name, the dead are succeeded."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dl_on_spark.errors import ConfigError, TrainingFailed
from dl_on_spark.training.run_folder import RunFolder
from dl_on_spark.training.run_lock import RunLock
from tests.cluster import REPOSITORY
from tests.training.put_only_store import PutOnlyStore

BEAT_S = 0.05
HOLDING = """
import sys
from dl_on_spark.training.run_folder import RunFolder
from dl_on_spark.training.run_lock import RunLock
with RunLock(RunFolder(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    if request.param == "disk":
        return RunFolder(str(tmp_path / "run"))
    PutOnlyStore.mounted(monkeypatch)
    return RunFolder("store://bucket/run/")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run in ``run``."""
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def from_elsewhere(folder: RunFolder, beat: int = 0) -> None:
    """The lock as a trainer on another machine would have written it, with the very number of this process."""
    content = json.loads(folder.read("lock.json") or b"")
    folder.write("lock.json", json.dumps({**content, "token": "other", "machine": "other", "beat": beat}))


def test_a_second_trainer_is_refused_with_the_name_of_the_first_and_changes_nothing(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    folder = RunFolder(str(tmp_path / "run"))
    before = folder.read("lock.json")
    with pytest.raises(ConfigError, match=rf"being trained by process {holder.pid} on .*, since 20") as caught:
        RunLock(folder).__enter__()
    assert caught.value.exit_code == 2
    assert folder.read("lock.json") == before
    holder.kill()
    holder.wait(10)
    began = time.monotonic()
    with RunLock(folder):
        assert time.monotonic() - began < 5  # no waiting for heartbeats of a process that is seen to be gone
    assert not list((tmp_path / "run").iterdir())


def test_a_trainer_in_another_thread_of_the_same_program_is_refused_until_the_first_has_left(folder: RunFolder) -> None:
    with RunLock(folder), pytest.raises(ConfigError, match="one run has one trainer"):
        RunLock(folder).__enter__()
    with RunLock(folder):
        pass
    assert folder.read("lock.json") is None


def test_a_holder_on_another_machine_lives_as_long_as_its_counter_moves(folder: RunFolder) -> None:
    with RunLock(folder, heartbeat_s=60):
        from_elsewhere(folder)
    assert folder.read("lock.json") is not None  # not ours any more, so it stays
    ended = threading.Event()

    def live() -> None:
        beat = 0
        while not ended.wait(BEAT_S):
            from_elsewhere(folder, beat := beat + 1)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="one run has one trainer"):
            RunLock(folder, heartbeat_s=60).__enter__()
    finally:
        ended.set()
        thread.join()
    with RunLock(folder, heartbeat_s=BEAT_S):
        assert b'"other"' not in (folder.read("lock.json") or b"")


def test_of_two_that_begin_in_the_same_moment_one_goes_on(folder: RunFolder) -> None:
    with RunLock(folder, heartbeat_s=BEAT_S) as first:
        first.check_alone()
        first.check_held()
        from_elsewhere(folder)  # as if it had looked before `first` wrote
        with pytest.raises(ConfigError, match="one run has one trainer"):
            first.check_alone()
        until = time.monotonic() + 20
        with pytest.raises(TrainingFailed, match="another trainer has taken over the run"):
            while time.monotonic() < until:
                first.check_held()
                time.sleep(BEAT_S)
    assert b'"other"' in (folder.read("lock.json") or b"")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"token": "x"}'])
def test_a_lock_that_nobody_can_have_written_holds_nothing(folder: RunFolder, content: str) -> None:
    folder.write("lock.json", content)
    with RunLock(folder) as lock:
        lock.check_alone()
        assert dataclasses.is_dataclass(lock._read())
