"""Devices and the environment of a worker."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.errors import ConfigError, PreflightError
from dl_on_spark.launch import LaunchRequest
from dl_on_spark.launch.child_process import child_environment
from dl_on_spark.launch.gpus import local_gpus, share_of_rank, visible_devices


@pytest.mark.parametrize(
    "addresses", [["0"], ["1"], ["3", "2"], ["GPU-8f6a", "GPU-11c2"], ["MIG-GPU-1/7/0"]], ids=" ".join
)
def test_a_worker_sees_its_devices_in_the_order_spark_gave_them(addresses):
    environment = visible_devices(addresses)
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(addresses)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_worker_without_devices_sees_none():
    assert visible_devices([]) == {"CUDA_VISIBLE_DEVICES": "-1"}


@given(st.integers(1, 5), st.integers(1, 4))
def test_shares_of_a_machine_are_disjoint_and_whole(workers, each):
    gpus = [f"GPU-{index}" for index in range(workers * each)]
    shares = [share_of_rank(gpus, rank, each) for rank in range(workers)]
    assert [gpu for share in shares for gpu in share] == gpus
    with pytest.raises(PreflightError, match="shows"):
        share_of_rank(gpus, workers, each)


def test_the_devices_of_a_machine_are_those_the_user_left_visible():
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-1"}) == ["2", "GPU-1"]
    assert local_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert local_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_workers_environment_is_a_copy_without_sparks_secrets(monkeypatch):
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "hidden")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(sys, "path", ["", "/archives/code.zip", *sys.path])
    environment = child_environment(3, ["1"], ["/beside/the/driver"], {"MINE": "1"})
    assert "PYTHON_WORKER_FACTORY_SECRET" not in environment
    assert (environment["KEPT"], environment["MINE"]) == ("yes", "1")
    paths = environment["PYTHONPATH"].split(":")
    assert paths[0] == "/archives/code.zip"
    assert paths[-1] == "/beside/the/driver"
    assert not any(path.endswith(("site-packages", "lib-dynload")) for path in paths)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": 0},
        {"entry": "module.function"},
        {"gpus_per_worker": -1},
        {"cpus_per_worker": 0},
        {"deadline_s": 0},
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_the_way_out(wrong):
    with pytest.raises(ConfigError) as caught:
        LaunchRequest(**{"num_workers": 1, "entry": "m:f", **wrong})
    assert caught.value.fix
