"""Preflight on a real session: what is refused, what is said, and that nothing is left behind."""

import sys
import time
import venv

import pytest

from dl_on_spark.errors import PreflightError
from dl_on_spark.launch import preflight
from dl_on_spark.launch.executor_probe import own_versions
from dl_on_spark.launch.preflight import check_settings, compare_versions


def test_two_workers_on_two_slots_pass_and_every_executor_is_described(spark):
    findings = preflight(spark, 2)
    assert {finding.level for finding in findings} == {"ok"}
    texts = [finding.what for finding in findings]
    assert "2 slots for 2 workers" in texts[0]
    assert len([text for text in texts if f"tensorflow {own_versions()['tensorflow']}" in text]) == 2


def test_more_workers_than_slots_are_refused_with_have_need_and_setting(spark):
    with pytest.raises(PreflightError) as caught:
        preflight(spark, 4)
    assert "4 workers need 4 slots; the cluster has 2 (spark.master=local[2]" in caught.value.message
    assert caught.value.fix == "Ask for num_workers=2, or set the master to local[4]."
    assert caught.value.exit_code == 2


def test_cores_of_a_local_master_are_shared_by_the_workers(spark):
    with pytest.raises(PreflightError, match=r"2 workers need 2 slots; .* has 1 .*cores per worker=2"):
        preflight(spark, 2, cpus_per_worker=2)


def test_gpus_that_this_machine_does_not_have_are_refused(spark, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(PreflightError, match="2 workers of 1 GPUs need 2; this machine shows 1"):
        preflight(spark, 2, gpus_per_worker=1)


@pytest.mark.parametrize("key", ["spark.dynamicAllocation.enabled", "spark.speculation"])
def test_settings_that_break_a_barrier_stage_are_named_with_the_value_to_set(key):
    findings = check_settings({key: "true"}.get, 2)
    assert [finding.level for finding in findings] == ["error"]
    assert f"{key}=true" in findings[0].what
    assert f"{key}=false" in findings[0].fix


def test_default_settings_pass():
    assert check_settings(lambda _key, default: default, 2) == []


def report(host, **versions):
    return {
        "host": host,
        "interpreter": "/opt/python",
        "versions": {"python": "3.11.7", "tensorflow": "2.21.0", "numpy": "2.4.0", **versions},
    }


def test_another_tensorflow_on_one_executor_blocks_and_names_host_interpreter_and_versions():
    driver = {"python": "3.11.7", "tensorflow": "2.21.0", "numpy": "2.4.0"}
    findings = compare_versions(driver, [report("good"), report("bad", tensorflow="2.20.0")])
    assert len(findings) == 1
    assert findings[0].level == "error"
    assert findings[0].what == "tensorflow is 2.20.0 on an executor and 2.21.0 on the driver."
    assert findings[0].where == "bad, /opt/python"


def test_another_numpy_is_a_warning_and_a_missing_package_blocks():
    driver = {"python": "3.11.7", "tensorflow": "2.21.0", "numpy": "2.4.0"}
    warned = compare_versions(driver, [report("a", numpy="2.3.0")])
    assert [finding.level for finding in warned] == ["warning"]
    missing = compare_versions(driver, [report("a", tensorflow=None)])
    assert [(finding.level, finding.what) for finding in missing] == [
        ("error", "tensorflow is missing on an executor.")
    ]


def test_a_driver_without_tensorflow_compares_the_executors_with_each_other():
    driver = {"python": "3.11.7", "tensorflow": None, "numpy": "2.4.0"}
    assert compare_versions(driver, [report("a"), report("b")]) == []
    mixed = compare_versions(driver, [report("a"), report("b", tensorflow="2.20.0")])
    assert mixed[0].what == "tensorflow is 2.20.0 on an executor and 2.21.0 on a."


def test_an_interpreter_without_packages_is_refused_by_its_path(spark, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", bare)
    with pytest.raises(PreflightError) as caught:
        preflight(spark, 2)
    assert bare in caught.value.message
    assert "PYSPARK_PYTHON" in caught.value.fix
    assert "at org." not in str(caught.value)


def test_an_interpreter_that_does_not_exist_is_refused_by_its_path(spark, monkeypatch):
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/no/such/python")
    with pytest.raises(PreflightError) as caught:
        preflight(spark, 2)
    assert "/no/such/python" in caught.value.message
    assert "at org." not in str(caught.value)


def test_a_probe_that_runs_but_does_not_end_is_not_blamed_on_slots(spark, monkeypatch):
    module = sys.modules["dl_on_spark.launch.preflight"]  # its function has the same name
    monkeypatch.setattr(module, "make_probe", lambda *_, **__: lambda: time.sleep(60) or {})
    monkeypatch.setattr(module, "DEADLINE_S", 12.0)
    with pytest.raises(PreflightError, match=r"2 of 2 tasks .* have not ended .* Their hosts are busy"):
        preflight(spark, 2)


def test_folders_that_can_be_used_pass_and_keep_no_trace(spark, tmp_path):
    table = tmp_path / "a table"
    table.mkdir()
    (table / "part.parquet").write_bytes(b"x")
    fresh = tmp_path / "runs" / "not yet there"
    findings = preflight(spark, 2, readable=[str(table), str(table / "part.parquet")], writable=[str(fresh)])
    assert {finding.level for finding in findings} == {"ok"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a table", "part.parquet"]


def test_a_table_that_executors_do_not_find_is_refused_by_name(spark, tmp_path):
    with pytest.raises(PreflightError, match="gone cannot be read: not found"):
        preflight(spark, 2, readable=[str(tmp_path / "gone")])


def test_a_checkpoint_folder_below_a_file_is_refused_by_name(spark, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(PreflightError, match=r"file/runs cannot be written"):
        preflight(spark, 2, writable=[str(tmp_path / "file" / "runs")])
