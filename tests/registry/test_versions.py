"""The registry: complete versions only, exclusive numbers, and the way back."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage
from dl_on_spark.registry import Registry
from dl_on_spark.registry.lease import Lease, lease
from tests.object_store import s3_server

DEADLINE_S = 60


def _publish(root: Path, model: str) -> int:
    files = {"model.keras": model.encode() * 1000, "metrics.json": b"{}"}
    return Registry(str(root), "m").publish(files, {"model_sha256": model}).number


def test_versions_count_up_and_the_last_is_current(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "m")
    assert registry.current() is None and registry.versions() == []
    assert [_publish(tmp_path, "a"), _publish(tmp_path, "b")] == [1, 2]
    current = registry.current()
    assert current is not None and current.number == 2 and current.lineage == {"model_sha256": "b"}
    assert (Path(current.folder) / "model.keras").read_bytes() == b"b" * 1000


def test_publishing_the_same_model_again_gives_the_same_version(tmp_path: Path) -> None:
    assert [_publish(tmp_path, m) for m in ("a", "b", "b")] == [1, 2, 2]
    current = Registry(str(tmp_path), "m").current()
    assert current is not None and current.number == 2


def test_an_interrupted_publication_leaves_the_current_model(tmp_path: Path) -> None:
    _publish(tmp_path, "a")
    torn: dict[str, Any] = {"model.keras": b"half", "metrics.json": None}
    with pytest.raises(TypeError):
        Registry(str(tmp_path), "m").publish(torn, {"model_sha256": "b"})
    registry = Registry(str(tmp_path), "m")
    current = registry.current()
    assert current is not None and current.number == 1
    assert [version.number for version in registry.versions()] == [1]
    assert _publish(tmp_path, "b") == 3  # the torn folder keeps its number


def test_rollback_goes_one_back_or_to_the_version_named(tmp_path: Path) -> None:
    for model in "abc":
        _publish(tmp_path, model)
    registry = Registry(str(tmp_path), "m")
    assert registry.roll_back().number == 2
    assert registry.roll_back(3).number == 3
    assert registry.roll_back(1).number == 1
    with pytest.raises(InputError, match="no earlier version"):
        registry.roll_back()
    with pytest.raises(InputError, match=r"no version 9.*\[1, 2, 3\]"):
        registry.roll_back(9)
    pointer = json.loads((tmp_path / "m" / "current.json").read_text())
    assert pointer["version"] == 1 and pointer["by"]


def test_a_job_that_is_run_again_undoes_no_rollback(tmp_path: Path) -> None:
    for model in "ab":
        _publish(tmp_path, model)
    registry = Registry(str(tmp_path), "m")
    registry.roll_back()
    with pytest.raises(InputError, match=r"this model is version 2 .* current before version 1 is") as caught:
        _publish(tmp_path, "b")
    assert "rollback --version 2" in (caught.value.fix or "")
    assert _publish(tmp_path, "a") == 1  # the current one's own job
    assert registry.roll_back(2).number == 2
    with pytest.raises(InputError, match="version 1"):
        _publish(tmp_path, "a")  # a night that was replaced by the next


def test_a_current_version_that_was_removed_is_named_and_rollback_still_works(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "m")
    for model in "ab":
        _publish(tmp_path, model)
    shutil.rmtree(tmp_path / "m" / "versions" / "2")
    with pytest.raises(InputError, match=r"version 2 .* not whole.*rollback"):
        registry.current()
    assert registry.roll_back().number == 1


def test_a_publisher_that_was_compared_with_another_version_does_not_move_the_pointer(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "m")
    registry.publish({"model.keras": b"a"}, {"model_sha256": "a"}, instead_of=None)
    with pytest.raises(InputError, match=r"version 1 .* became current while version 2 .*Run the job again"):
        registry.publish({"model.keras": b"b"}, {"model_sha256": "b"}, instead_of=None)
    current = registry.current()
    assert current is not None and current.number == 1
    again = registry.publish({"model.keras": b"b"}, {"model_sha256": "b"}, instead_of=1)
    assert again.number == 2 and registry.current() == again


def test_rollback_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no version yet"):
        Registry(str(tmp_path), "m").roll_back()


def test_publishers_at_the_same_time_get_numbers_of_their_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    publishers = [context.Process(target=_publish_many, args=(tmp_path, who, start)) for who in "ab"]
    for process in publishers:
        process.start()
    for process in publishers:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    registry = Registry(str(tmp_path), "m")
    found = registry.versions()
    assert len({version.number for version in found}) == len(found) == 20
    for version in found:
        expected = version.lineage["model_sha256"].encode() * 1000
        assert (Path(version.folder) / "model.keras").read_bytes() == expected
    current = registry.current()
    assert current is not None and current in found


def _publish_many(root: Path, who: str, start: Any) -> None:
    start.wait(DEADLINE_S)
    for number in range(10):
        _publish(root, f"{who}{number}")


def test_a_publisher_killed_before_any_of_its_steps_leaves_a_whole_current_version(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    for step in itertools.count(1):
        root = tmp_path / str(step)
        _publish(root, "a")
        publisher = context.Process(target=_publish_until_step, args=(root, "b", step))
        publisher.start()
        publisher.join(DEADLINE_S)
        current, found = Registry(str(root), "m").current(), Registry(str(root), "m").versions()
        assert current is not None and current in found
        for version in found:
            expected = version.lineage["model_sha256"].encode() * 1000
            assert (Path(version.folder) / "model.keras").read_bytes() == expected
        whole = [version.number for version in found]
        assert whole in ([1], [1, 2]) and current.number in whole
        if publisher.exitcode == 0:
            assert current.number == 2
            break
        assert publisher.exitcode == -signal.SIGKILL
        again = _publish(root, "b")  # neither the torn folder nor the lock is in the way
        after = Registry(str(root), "m").current()
        assert after is not None and after.number == again and after.lineage == {"model_sha256": "b"}
    assert step > 10  # folder, each file and its renaming, lock, pointer


def _publish_until_step(root: Path, model: str, last: int) -> None:
    """Publish, and die before the `last`-th change of a file or folder below `root`."""
    steps = itertools.count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "fcntl.flock"):
            ours = event == "fcntl.flock" or str(args[0]).startswith(str(root))
            if ours and next(steps) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    _publish(root, model)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "one"}', "{}"])
def test_a_damaged_pointer_or_lineage_is_named(tmp_path: Path, text: str) -> None:
    _publish(tmp_path, "a")
    registry = Registry(str(tmp_path), "m")
    pointer = tmp_path / "m" / "current.json"
    whole = pointer.read_bytes()
    pointer.write_text(text)
    with pytest.raises(InputError, match=r"current\.json is damaged"):
        registry.current()
    pointer.write_bytes(whole)
    (tmp_path / "m" / "versions" / "1" / "lineage.json").write_text(text)
    with pytest.raises(InputError, match=r"lineage\.json is damaged"):
        registry.current()


def test_a_registry_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    registry = Registry(str(tmp_path / "file" / "models"), "m")
    assert registry.current() is None
    with pytest.raises(InputError, match="cannot be written"):
        registry.check_writable()
    Registry(str(tmp_path / "new"), "m").check_writable()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_rollback_does_not_go_to_a_version_that_was_left_by_one(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "m")
    for model in "ab":
        _publish(tmp_path, model)
    registry.roll_back(reason="scores doubled")
    _publish(tmp_path, "c")
    known = registry.numbers()
    assert [registry.stages().stage(n, known) for n in known] == ["previous", "withdrawn", "current"]
    assert registry.roll_back().number == 1  # not 2, the bad one of the night before
    with pytest.raises(InputError, match="no earlier version"):
        registry.roll_back()
    assert registry.roll_back(2).number == 2 and registry.stages().withdrawn == (3,)
    told = [(event["version"], event["what"], event["reason"]) for event in registry.stages().history]
    assert told == [
        (1, "publish", None),
        (2, "publish", None),
        (1, "rollback", "scores doubled"),
        (3, "publish", None),
        (1, "rollback", None),
        (2, "promote", None),
    ]


def test_the_last_versions_stay_with_the_current_one_and_the_way_back(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "m")
    for model in "abcdef":
        _publish(tmp_path, model)
    registry.roll_back(3)
    assert registry.retain(1) == [1, 4, 5]
    assert registry.numbers() == [2, 3, 6] and registry.stages().current == 3
    assert sorted(path.name for path in (tmp_path / "m" / "versions").iterdir()) == ["2", "3", "6"]
    assert registry.roll_back().number == 2
    assert _publish(tmp_path, "g") == 7
    with pytest.raises(InputError, match=r"no version 1; it has \[2, 3, 6, 7\]"):
        registry.version(1)


def test_of_two_publishers_to_an_object_store_one_wins_and_none_is_torn() -> None:
    context = multiprocessing.get_context("spawn")
    with s3_server() as store:
        start, ended = context.Barrier(3), context.Queue()
        publishers = [context.Process(target=_publish_to_a_store, args=(store, who, start, ended)) for who in "abc"]
        for process in publishers:
            process.start()
        outcomes = [ended.get(timeout=DEADLINE_S) for _ in publishers]
        for process in publishers:
            process.join(DEADLINE_S)
        registry = Registry(f"{store}/models", "m")
        won = [who for who, said in outcomes if said == "won"]
        lost = [said for _, said in outcomes if said != "won"]
        assert len(won) == 1 and all("became current while version" in said for said in lost)
        current = registry.current()
        assert current is not None and current.lineage["model_sha256"] == won[0]
        assert [version.number for version in registry.versions()] == [1, 2, 3]
        for version in registry.versions():
            expected = version.lineage["model_sha256"].encode() * 1000
            assert storage.read_bytes(storage.join(version.folder, "model.keras")) == expected
        _publish_from(f"{store}/models", "d", current.number)
        assert registry.roll_back().number == current.number
        removed = registry.retain(1)
        assert removed and not {current.number, 4} & set(removed)
        assert registry.numbers() == sorted({1, 2, 3, 4} - set(removed))


def _publish_to_a_store(store: str, who: str, start: Any, ended: Any) -> None:
    start.wait(DEADLINE_S)
    try:
        _publish_from(f"{store}/models", who, None)
        ended.put((who, "won"))
    except InputError as error:
        ended.put((who, str(error)))


def _publish_from(root: str, model: str, instead_of: int | None) -> None:
    files = {"model.keras": model.encode() * 1000, "metrics.json": b"{}"}
    Registry(root, "m").publish(files, {"model_sha256": model}, instead_of=instead_of)


def test_a_claim_left_behind_on_an_object_store_counts_no_more_after_a_while() -> None:
    with s3_server() as store:
        storage.write_bytes(f"{store}/m/claims/of-a-dead-publisher", b"{}")
        with pytest.raises(InputError, match="held by another publication"), lease(f"{store}/m", 1.0):
            pass
        with lease(f"{store}/m", 30.0, stale_s=3.0) as held:
            held.check()
        assert storage.list_files(f"{store}/m/claims") == ["of-a-dead-publisher"]
    with pytest.raises(InputError, match="too slowly"):
        Lease(0.0).check()
