"""A run folder tells runs and attempts apart and changes nothing before a run begins."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from dl_on_spark.errors import CheckpointError, ConfigError, InputError
from dl_on_spark.lake import storage
from dl_on_spark.training.result import TrainingResult
from dl_on_spark.training.run_folder import RunFolder, RunRecord
from tests.training.put_only_store import PutOnlyStore

RESULT = TrainingResult(
    history={"loss": [0.5, 0.25]},
    metrics={"loss": 0.25},
    model_path="model.keras",
    run_dir="run",
    rows_per_second=10.5,
    bytes_sent=7,
    restarts=1,
    steps=34,
    epochs=2,
    workers=2,
    rows_per_epoch=1_037,
    seconds=1.5,
)


def record(epochs: int = 2) -> RunRecord:
    return RunRecord({"seed": 7}, "{}", epochs)


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    if request.param == "disk":
        return RunFolder(str(tmp_path / "run"))
    PutOnlyStore.mounted(monkeypatch)
    return RunFolder("store://bucket/run/")


def test_a_later_attempt_takes_over_also_when_both_took_the_same_number(folder: RunFolder) -> None:
    first = folder.next_attempt()
    assert folder.is_current(first)
    before = folder.read("attempt.json")
    second = folder.next_attempt()
    assert (first.number, second.number) == (1, 2)
    assert (folder.is_current(first), folder.is_current(second)) == (False, True)
    assert before is not None
    folder.write("attempt.json", before)  # another driver that read the file at the same time as `second`'s
    racing = folder.next_attempt()
    assert racing.number == second.number
    assert (folder.is_current(second), folder.is_current(racing)) == (False, True)


def test_a_new_run_replaces_the_old_one_and_goes_on_counting_attempts(folder: RunFolder) -> None:
    old, new = record(), record()
    stale = folder.next_attempt()
    folder.begin(old, {"schema.yaml": "old"})
    folder.write("checkpoints/step-00000001-a001/manifest.json", "{}")
    folder.write("result.json", RESULT.to_json())
    assert (folder.holds(old), folder.holds(new)) == (True, False)
    assert folder.result() == RESULT
    assert folder.next_attempt().number == 2
    folder.begin(new, {"schema.yaml": "new"})
    assert (folder.holds(old), folder.holds(new)) == (False, True)
    assert folder.record() == new
    assert folder.read("schema.yaml") == b"new"
    assert folder.result() is None
    assert folder.read("checkpoints/step-00000001-a001/manifest.json") is None
    assert not folder.is_current(stale)


def test_a_run_that_goes_on_keeps_its_checkpoints_and_is_no_longer_finished(folder: RunFolder) -> None:
    run = record(epochs=1)
    folder.begin(run, {})
    folder.write("checkpoints/step-00000001-a001/manifest.json", "{}")
    folder.write("result.json", RESULT.to_json())
    folder.begin(RunRecord(run.identity, run.plan, 2, run.id), {})
    assert folder.result() is None
    assert folder.read("checkpoints/step-00000001-a001/manifest.json") == b"{}"


def test_giving_up_leaves_no_trace_but_never_touches_a_run_that_has_begun_or_another_attempt(folder: RunFolder) -> None:
    first = folder.next_attempt()
    folder.event("attempt", attempt=first.number)
    second = folder.next_attempt()
    folder.give_up(first)
    assert folder.is_current(second)
    folder.give_up(second)
    assert folder.read("attempt.json") is folder.read("events.jsonl") is None
    third = folder.next_attempt()
    folder.begin(record(), {})
    folder.give_up(third)
    assert folder.is_current(third)


def test_events_are_json_lines_in_their_order(folder: RunFolder) -> None:
    folder.write("run.json", "")  # makes the folder on a disk
    for step in range(3):
        folder.event("checkpoint", step=step)
    lines = [json.loads(line) for line in (folder.read("events.jsonl") or b"").splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [("checkpoint", step) for step in range(3)]


def test_an_unreadable_record_is_named_and_holds_no_run(folder: RunFolder) -> None:
    for damaged in ("{", "[]", '{"identity": {}}', "3"):
        folder.write("run.json", damaged)
        with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
            folder.record()
        assert not folder.holds(record())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"attempt": "x"}'])
def test_damaged_files_of_a_run_are_named_and_damaged_statistics_are_made_again(folder: RunFolder, text: str) -> None:
    for name in ("attempt.json", "result.json", "statistics.json"):
        folder.write(name, text)
    with pytest.raises(ConfigError, match=r"attempt\.json cannot be read .*Remove that file"):
        folder.next_attempt()
    with pytest.raises(ConfigError, match=r"result\.json cannot be read .*Remove that file"):
        folder.result()
    assert folder.statistics() is None


def test_what_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = RunFolder(str(tmp_path / "file" / "run"))
    for write in (lambda: folder.write("result.json", "{}"), lambda: folder.event("attempt")):
        with pytest.raises(CheckpointError, match=r"file/run/.* cannot be written .*make room on its disk"):
            write()


def test_a_full_disk_is_found_before_a_run_begins(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(uri: str, data: bytes) -> None:
        if data:  # the name alone still finds room
            raise OSError(errno.ENOSPC, "No space left on device", uri)

    monkeypatch.setattr(storage, "write_bytes", full)
    with pytest.raises(InputError, match="No space left on device"):
        folder.check_writable()
