"""Launches on a real local session: results, first causes, deadlines, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.leftovers import nothing_left
from dl_on_spark.errors import Cancelled, ModelError, WorkerFailed
from dl_on_spark.launch import LaunchRequest, launch
from dl_on_spark.launch.barrier import BarrierJob
from dl_on_spark.launch.worker_process import TaskSpec, run_worker
from tests.cluster import REPOSITORY, spark_environment


def request(entry, **options):
    return LaunchRequest(2, f"tests.launch.entries:{entry}", **options)


def ignore(_message):
    pass


def trainers():
    """Trainer processes on this machine that descend from this test run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "dl_on_spark.launch.child" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def gone(pid):
    """Whether the process ends within a few seconds (the kernel's kill is not instant)."""
    try:
        psutil.Process(pid).wait(timeout=10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture(autouse=True)
def _no_trainer_is_left():
    yield
    _, alive = psutil.wait_procs(trainers(), timeout=5)
    assert not alive


def test_two_workers_exchange_through_the_announced_listeners_and_results_come_by_rank(spark):
    messages = []
    results = launch(
        spark,
        request("exchange", payload=b"\x00binary", attempt=3, env={"EXTRA": "yes", "OMP_NUM_THREADS": "7"}),
        messages.append,
    )
    assert [(one["rank"], one["heard"]) for one in results] == [(0, 1), (1, 0)]
    assert {one["payload"] for one in results} == {"\x00binary"}
    assert {one["attempt"] for one in results} == {3}
    assert len({one["secret"] for one in results}) == 1
    for rank in (0, 1):
        mine = [message for message in messages if message.rank == rank]
        assert [message.kind for message in mine] == ["progress"] * 3 + ["metrics"]
        assert [message.fields["step"] for message in mine[:3]] == [0, 1, 2]
        assert mine[3].fields == {"epoch": 0, "logs": {"loss": 0.5}}
    environment = results[0]["environment"]
    assert environment["EXTRA"] == "yes"
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["TF_NUM_INTRAOP_THREADS"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"


def test_each_worker_has_a_folder_for_temporary_files_that_goes_with_it(spark):
    results = launch(spark, request("leave_temporary_file"), ignore)
    files = [Path(one["file"]) for one in results]
    assert len({file.parent for file in files}) == 2
    assert not any(file.parent.exists() for file in files)


def test_no_secret_is_in_the_arguments_or_the_environment_of_a_worker(spark):
    results = launch(spark, request("exchange"), ignore)
    for one in results:
        visible = " ".join([*one["arguments"], *one["environment"].values()])
        assert one["secret"] not in visible
        assert not any("SECRET" in name for name in one["environment"])


def test_cpus_per_worker_sets_the_thread_counts(spark):
    results = launch(spark, request("exchange", cpus_per_worker=3), ignore)
    for one in results:
        assert one["cpus"] == 3
        for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            assert one["environment"][variable] == "3"


def test_the_environment_of_reused_python_workers_is_untouched(spark):
    def environments():
        job = BarrierJob(spark, lambda: {str(os.getpid()): dict(os.environ)}, 2)
        job.start()
        assert job.join(60)
        assert job.error is None
        return {pid: environment for one in job.outcomes for pid, environment in one.items()}

    before = environments()
    launch(spark, request("exchange", env={"CUDA_VISIBLE_DEVICES": "5", "LEAK": "1"}), ignore)
    after = environments()
    reused = before.keys() & after.keys()
    assert reused
    assert all(before[pid] == after[pid] for pid in reused)
    assert all("LEAK" not in environment for environment in after.values())


def test_an_exception_on_rank_1_shows_its_traceback_first_and_no_java(spark):
    with pytest.raises(WorkerFailed) as caught:
        launch(spark, request("fail_on_one"), ignore)
    error = caught.value
    assert (error.rank, error.host, error.step, error.retryable) == (1, "127.0.0.1", 7, False)
    text = str(error)
    assert text.startswith("Traceback (most recent call last):")
    assert "ValueError: the model broke on rank 1" in text
    assert "worker 1 on 127.0.0.1 at step 7" in error.message
    assert "at org." not in text
    assert "Py4J" not in text


def test_a_failed_exchange_gives_way_to_its_cause(spark):
    with pytest.raises(WorkerFailed, match="the cause") as caught:
        launch(spark, request("fail_with_echo"), ignore)
    assert caught.value.rank == 1


def test_bad_input_found_by_a_worker_keeps_its_type_and_its_way_out(spark):
    with pytest.raises(ModelError) as caught:
        launch(spark, request("bad_model"), ignore)
    assert caught.value.message == "the model is not compiled."
    assert caught.value.fix == "Call model.compile()."
    assert caught.value.exit_code == 2


def test_an_entry_that_cannot_be_imported_is_named(spark):
    with pytest.raises(WorkerFailed, match="no_such_module") as caught:
        launch(spark, LaunchRequest(2, "no_such_module:run"), ignore)
    assert not caught.value.retryable


@pytest.mark.faults
def test_a_killed_worker_is_named_with_signal_step_and_last_words(spark):
    with pytest.raises(WorkerFailed, match="SIGKILL") as caught:
        launch(spark, request("kill_one"), ignore)
    assert (caught.value.rank, caught.value.step, caught.value.retryable) == (1, 3, True)
    assert "last words of rank 1" in caught.value.traceback


@pytest.mark.faults
def test_a_killed_task_takes_its_trainer_along_and_is_named(spark):
    pids = {}

    def kill_task_of_rank_1(message):
        pids[message.rank] = [int(pid) for pid in message.fields["text"].split()]
        if len(pids) == 2:
            os.kill(psutil.Process(pids[1][0]).ppid(), signal.SIGKILL)

    with pytest.raises(WorkerFailed) as caught:
        launch(spark, request("hang_with_child"), kill_task_of_rank_1)
    assert caught.value.rank == 1
    assert caught.value.retryable
    assert "at org." not in str(caught.value)
    assert gone(pids[0][0])
    assert gone(pids[1][0])
    assert gone(pids[0][1])


@pytest.mark.faults
def test_a_hung_worker_is_named_with_its_step_and_where_it_hangs(spark):
    with pytest.raises(WorkerFailed, match="deadline_s") as caught:
        launch(spark, request("hang_on_one", deadline_s=3), ignore)
    assert (caught.value.rank, caught.value.step) == (1, 5)
    assert "in hang_on_one" in caught.value.traceback


@pytest.mark.faults
def test_a_worker_that_keeps_others_waiting_is_named_with_who_waits_since_when_and_in_what(spark):
    with pytest.raises(WorkerFailed, match="while its peers waited for it") as caught:
        launch(spark, request("hang_before_exchange", deadline_s=3), ignore)
    error = caught.value
    assert (error.rank, error.step) == (1, 5)
    assert "in hang_before_exchange" in error.traceback
    waited = r"Who waited: worker 0 at step 5: rank 0 of 2, allreduce\(float32\[3\], sum\) #\d+: rank 1 did not answer "
    assert re.search(waited + r"within 3 s, since \d\d:\d\d:\d\d UTC", error.message), error.message


@pytest.mark.faults
def test_a_stopped_process_is_silent_and_named(spark):
    pids = {}

    def stop_rank_0(message):
        pids[message.rank] = [int(pid) for pid in message.fields["text"].split()]
        if message.rank == 0:
            os.kill(pids[0][0], signal.SIGSTOP)

    with pytest.raises(WorkerFailed, match="silent for") as caught:
        launch(spark, request("hang_with_child", deadline_s=3), stop_rank_0)
    assert caught.value.rank == 0
    assert all(gone(pid) for own in pids.values() for pid in own)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_driver_cancels_and_ends_every_process(spark, sent):
    pids = {}

    def interrupt_when_both_run(message):
        pids[message.rank] = [int(pid) for pid in message.fields["text"].split()]
        if len(pids) == 2:
            signal.raise_signal(sent)

    with pytest.raises(Cancelled):
        launch(spark, request("hang_with_child"), interrupt_when_both_run)
    assert all(gone(pid) for own in pids.values() for pid in own)
    assert launch(spark, request("exchange"), ignore)[0]["heard"] == 1  # the session still works


def test_a_job_that_is_cancelled_through_spark_ends_every_process_and_is_no_failure_to_retry(spark):
    pids = {}

    def cancel_when_both_run(message):
        pids[message.rank] = [int(pid) for pid in message.fields["text"].split()]
        if len(pids) == 2:
            spark.sparkContext.cancelJobGroup("nightly")

    spark.sparkContext.setJobGroup("nightly", "a scheduler's group")
    try:
        with pytest.raises(Cancelled, match="cancelled job group nightly"):
            launch(spark, request("hang_with_child"), cancel_when_both_run)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    assert all(gone(pid) for own in pids.values() for pid in own)


def test_ten_runs_back_to_back_leave_nothing(spark):
    launch(spark, request("sum_ranks"), ignore)  # what Spark opens once
    with nothing_left():
        for _ in range(10):
            results = launch(spark, request("sum_ranks"), ignore)
            assert results == [{"sum": 3.0, "way": "shared_memory"}] * 2


@pytest.mark.faults
def test_a_driver_killed_outright_takes_every_process_along():
    script = (
        "import os, sys\n"
        "from pyspark.sql import SparkSession\n"
        "from dl_on_spark.launch import LaunchRequest, launch\n"
        "spark = SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "say = lambda message: print(message.fields['text'], flush=True)\n"
        "launch(spark, LaunchRequest(2, 'tests.launch.entries:hang_with_child'), say)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=spark_environment(),
        cwd=REPOSITORY,
    ) as driver:
        pids = [int(pid) for _ in range(2) for pid in driver.stdout.readline().split()]
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    assert len(pids) == 4
    assert all(gone(process.pid) for process in family)
    assert all(gone(pid) for pid in pids)


def test_an_error_of_the_listener_ends_the_run_and_passes(spark):
    def broken(_message):
        raise RuntimeError("the listener broke")

    with pytest.raises(RuntimeError, match="the listener broke"):
        launch(spark, request("hang_with_child"), broken)


def test_a_launch_without_slots_ends_with_the_reason_though_spark_only_retries(spark):
    with pytest.raises(WorkerFailed, match="no 3 free slots") as caught:
        launch(spark, LaunchRequest(3, "tests.launch.entries:exchange", deadline_s=2), ignore)
    assert "fewer workers" in caught.value.fix


def test_a_run_goes_on_when_the_driver_cannot_be_reached(spark):
    spec = TaskSpec(request("exchange"), b"secret", driver_address="127.0.0.1:1", local=True)
    job = BarrierJob(spark, lambda: run_worker(spec), 2)
    job.start()
    assert job.join(60)
    assert [outcome["result"]["heard"] for outcome in job.outcomes] == [1, 0]


def test_a_worker_without_driver_and_progress_ends_itself(spark):
    alone = LaunchRequest(1, "tests.launch.entries:hang_with_child", deadline_s=2)
    spec = TaskSpec(alone, b"secret", driver_address="127.0.0.1:1", local=True)
    job = BarrierJob(spark, lambda: run_worker(spec), 1)
    job.start()
    assert job.join(60)
    assert "no progress for 2 s" in job.outcomes[0]["failure"]["message"]
    assert "wait_forever" in job.outcomes[0]["failure"]["traceback"]
