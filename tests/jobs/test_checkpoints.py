"""`checkpoints list|verify|prune` on run folders: what is whole, what is damaged, and what pruning leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dl_on_spark.cli import app
from dl_on_spark.errors import ConfigError
from dl_on_spark.jobs import checkpoints
from dl_on_spark.training.run_folder import RunFolder, RunRecord
from tests.training.test_checkpoint import save, store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints, the furthest by a second attempt."""
    folder = RunFolder(str(tmp_path))
    folder.write("run.json", RunRecord({}, "{}", 3).to_json())
    for attempt, steps in ((1, (4, 8)), (2, (12,))):
        folder.next_attempt()
        for step in steps:
            save(store(tmp_path, attempt), step, attempt=attempt)
    return tmp_path


def flip(run: Path, step: int) -> Path:
    (file,) = run.glob(f"checkpoints/step-{step:08d}-*/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_all_are_listed_furthest_first_with_what_they_hold(run: Path) -> None:
    done = CliRunner().invoke(app, ["checkpoints", "list", str(run), "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert [one["step"] for one in said["checkpoints"]] == [12, 8, 4]
    assert said["whole"] == 3
    for one in said["checkpoints"]:
        files = (run / "checkpoints" / one["name"]).glob("*.safetensors")
        assert one["bytes"] == sum(file.stat().st_size for file in files)


def test_a_flipped_bit_is_found_by_verify_and_named(run: Path) -> None:
    file = flip(run, 12)
    assert CliRunner().invoke(app, ["checkpoints", "list", str(run)]).exit_code == 0
    done = CliRunner().invoke(app, ["checkpoints", "verify", str(run)])
    assert done.exit_code == 2
    assert file.name in done.stdout.replace("\n", "")
    assert [one.problem is None for one in checkpoints.found(str(run), verify=True)] == [False, True, True]


def test_pruning_never_leaves_a_damaged_checkpoint_alone(run: Path) -> None:
    flip(run, 12)
    removed = checkpoints.prune(str(run), keep=1)
    assert removed == ["step-00000004-a001"]
    assert [one.step for one in checkpoints.found(str(run), verify=True) if one.problem is None] == [8]


def test_pruning_spares_what_the_current_attempt_is_writing(run: Path) -> None:
    for name in ("step-00000016-a002", "step-00000010-a001"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    assert checkpoints.prune(str(run), keep=2) == ["step-00000010-a001", "step-00000004-a001"]
    assert (run / "checkpoints" / "step-00000016-a002").exists()


def test_a_folder_without_a_run_and_a_number_below_one_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        checkpoints.prune(str(run), keep=0)
    with pytest.raises(ConfigError, match="holds no training run"):
        checkpoints.found(str(tmp_path / "elsewhere"))
