"""Checkpoints are complete or absent, verified, fenced and pruned."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.errors import CheckpointError
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.training import checkpoint
from dl_on_spark.training.checkpoint import MODEL, CheckpointStore, Manifest, rank_file
from tests.training.put_only_store import PutOnlyStore


def store(folder: Path | str, attempt: int = 1, *, current: bool = True) -> CheckpointStore:
    return CheckpointStore(str(folder), attempt, lambda: current)


def save(into: CheckpointStore, step: int, *, world: int = 2, attempt: int = 1, loss: float = 1.0) -> None:
    files = [into.put(step, MODEL, {"weight/0000/w": np.full((3, 2), step, np.float32)})]
    files += [into.put(step, rank_file(rank), {"seed": np.array([rank, step])}) for rank in range(world)]
    into.commit(Manifest(step, Cursor(0, step), attempt, world, tuple(files), {"loss": loss}, {"history": {}}))


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    saved = store(tmp_path)
    values = {
        "a": np.float32([[1.5, -0.0], [np.pi, 1e-38]]),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float16),
        "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    }
    files = (saved.put(5, MODEL, values), saved.put(5, rank_file(0), {}))
    saved.commit(Manifest(5, Cursor(1, 2), 1, 1, files))
    found = saved.latest()
    assert found is not None
    assert found.manifest.cursor == Cursor(1, 2)
    loaded = found.load(MODEL)
    for name, value in values.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(loaded[name], value)
    assert found.load_rank(0) == {}


def test_a_checkpoint_without_its_manifest_does_not_exist(tmp_path: Path) -> None:
    saved = store(tmp_path)
    save(saved, 10)
    saved.put(20, MODEL, {"w": np.zeros(3)})
    found = saved.latest()
    assert found is not None
    assert found.manifest.step == 10


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = store(tmp_path)
    save(saved, 10)
    save(saved, 20)
    file = tmp_path / "checkpoints" / "step-00000020-a001" / ("manifest.json" if damage == "manifest" else MODEL)
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        data[len(data) // 2] ^= 0x10
        file.write_bytes(bytes(data[:-1]) if damage == "truncate" else bytes(data if damage == "flip" else b"{"))
    found = saved.latest()
    assert found is not None
    assert found.manifest.step == 10
    assert str(file.parent.name) in caplog.text


def test_a_stale_attempt_cannot_commit_and_the_later_attempt_wins(tmp_path: Path) -> None:
    save(store(tmp_path, attempt=2), 10, attempt=2)
    stale = store(tmp_path, attempt=1, current=False)
    with pytest.raises(CheckpointError, match="attempt 1 is stale"):
        save(stale, 20)
    found = store(tmp_path, attempt=3).latest()
    assert found is not None
    assert (found.manifest.step, found.manifest.attempt) == (10, 2)


def test_an_attempt_that_becomes_stale_between_the_look_and_the_write_withdraws_its_manifest(tmp_path: Path) -> None:
    looks = iter([True, False])
    stale = CheckpointStore(str(tmp_path), 1, lambda: next(looks))
    with pytest.raises(CheckpointError, match="attempt 1 is stale"):
        save(stale, 20)
    assert store(tmp_path, attempt=2).latest() is None


def test_with_another_number_of_ranks_each_takes_a_saved_state(tmp_path: Path) -> None:
    saved = store(tmp_path)
    save(saved, 10, world=2)
    found = saved.latest()
    assert found is not None
    assert [int(found.load_rank(rank)["seed"][0]) for rank in range(5)] == [0, 1, 0, 1, 0]


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    saved = store(tmp_path)
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.4), (40, 0.3)):
        save(saved, step, loss=loss)
    saved.prune(2, best=lambda manifest: -manifest.metrics["loss"])
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000020-a001", "step-00000030-a001", "step-00000040-a001"]


def test_pruning_survives_a_damaged_manifest_and_removes_what_earlier_attempts_left(tmp_path: Path) -> None:
    save(store(tmp_path), 10)
    save(store(tmp_path), 20)
    (tmp_path / "checkpoints" / "step-00000020-a001" / "manifest.json").write_text("{")
    store(tmp_path).put(30, MODEL, {"w": np.zeros(3)})
    later = store(tmp_path, attempt=2)
    save(later, 15, attempt=2)
    later.put(18, rank_file(1), {})
    later.prune(2, best=lambda manifest: -manifest.metrics["loss"])
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000010-a001", "step-00000015-a002", "step-00000018-a002"]


def test_a_newer_format_is_refused_by_name_and_never_passed_over_for_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    saved = store(tmp_path)
    save(saved, 10)
    files = (saved.put(20, MODEL, {}),)
    saved.commit(Manifest(20, Cursor(0, 20), 1, 1, files, format=99))
    for find in (saved.latest, lambda: saved.verify("step-00000020-a001")):
        with pytest.raises(CheckpointError, match=r"step-00000020-a001 has checkpoint format 99; .* reads up to 1"):
            find()


def test_a_path_out_of_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    saved = store(tmp_path)
    files = (checkpoint.FileDigest("../../secret", 1, "0" * 64),)
    saved.commit(Manifest(10, Cursor(0, 10), 1, 1, files))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./\.\./secret'"):
        saved.verify("step-00000010-a001")


@settings(max_examples=150, deadline=None)
@given(file=st.sampled_from(["manifest.json", MODEL, "rank-0001.safetensors"]), data=st.data())
def test_no_flipped_bit_and_no_lost_end_is_ever_taken_for_a_checkpoint(file: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = store(folder)
        save(saved, 10)
        save(saved, 20)
        whole = saved.open("step-00000020-a001")
        path = Path(whole.folder, file)
        content = path.read_bytes()
        place = data.draw(st.integers(0, len(content) - 1), label="place")
        if data.draw(st.booleans(), label="truncate"):
            damaged = content[:place]
        else:
            flipped = content[place] ^ (1 << data.draw(st.integers(0, 7), label="bit"))
            damaged = content[:place] + bytes([flipped]) + content[place + 1 :]
        path.write_bytes(damaged)
        found = saved.latest()
        assert found is not None
        if found.manifest.step == 20:  # a change of white space in the manifest changes nothing
            assert file == "manifest.json"
            assert json.loads(damaged) == json.loads(content)
            assert found == whole
        else:
            assert float(found.load(MODEL)["weight/0000/w"][0, 0]) == 10.0


def test_a_store_without_rename_append_or_random_writes_holds_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = PutOnlyStore.mounted(monkeypatch).objects
    saved = store("store://bucket/run")
    for step in (10, 20, 30):
        save(saved, step)
    saved.put(40, MODEL, {"w": np.zeros(3)})
    found = saved.latest()
    assert found is not None
    assert (found.manifest.step, int(found.load_rank(1)["seed"][1])) == (30, 30)
    objects["bucket/run/checkpoints/step-00000030-a001/model.safetensors"] = b""
    found = saved.latest()
    assert found is not None
    assert found.manifest.step == 20
    saved.prune(2)
    assert {key.split("/")[3] for key in objects} == {
        "step-00000020-a001",
        "step-00000030-a001",
        "step-00000040-a001",
    }


def test_a_file_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    store = CheckpointStore(str(tmp_path), 1, lambda: True)
    with pytest.raises(CheckpointError, match=r"step-00000004-a001/model\.safetensors cannot be written .*make room"):
        store.put(4, "model.safetensors", {"w": np.zeros(2)})
