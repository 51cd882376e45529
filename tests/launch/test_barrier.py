"""The barrier job: outcomes, cancelling, and what Spark's exceptions say in plain words."""

import threading

from dl_on_spark.launch.barrier import BarrierJob, input_error, is_local, plain_cause, worker_profile

STACK = "\tat org.apache.spark.Runner.run(Runner.scala:1)\n\tat java.base/java.lang.Thread.run(Thread.java:8)"
ABORTED = (
    "An error occurred while calling o1.collectToPython.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Could not recover from a failed "
    "barrier ResultStage. Most recent failure reason: Stage failed because barrier task finished.\n"
)


def test_each_task_runs_once_and_outcomes_come_by_rank(spark):
    def work():
        from pyspark import BarrierTaskContext

        return {"rank": BarrierTaskContext.get().partitionId()}

    ended = threading.Event()
    job = BarrierJob(spark, work, 2, on_end=ended.set)
    job.start()
    assert job.join(60)
    assert ended.is_set()
    assert job.outcomes == [{"rank": 0}, {"rank": 1}]


def test_an_exception_in_a_task_ends_the_job_with_its_python_traceback(spark):
    def work():
        raise ValueError("boom in the task")

    job = BarrierJob(spark, work, 2)
    job.start()
    assert job.join(60)
    headline, traceback = plain_cause(job.error)
    assert headline == "ValueError: boom in the task"
    assert traceback.startswith("Traceback")
    assert traceback.endswith("ValueError: boom in the task")


def test_a_job_without_slots_does_not_start_and_can_be_cancelled(spark):
    job = BarrierJob(spark, dict, 3)
    job.start()
    assert not job.join(1.0)
    job.cancel()
    assert job.join(60)
    assert job.error is not None


def test_a_local_master_needs_no_profile(spark):
    assert is_local(spark)
    assert worker_profile(spark, 1, 4) is None


def test_a_missing_interpreter_is_said_without_java():
    text = ABORTED + 'java.io.IOException: Cannot run program "/x": error=2\n' + STACK
    assert plain_cause(RuntimeError(text)) == ('Cannot run program "/x": error=2', None)


def test_a_lost_executor_is_said_without_java():
    text = ABORTED + "ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137\n" + STACK
    headline, traceback = plain_cause(RuntimeError(text))
    assert headline == "ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 137"
    assert traceback is None


def test_an_exception_without_text_is_named():
    assert plain_cause(RuntimeError()) == ("RuntimeError", None)


def test_a_value_a_name_or_a_file_that_spark_refuses_is_bad_input_and_a_users_error_is_not():
    file = RuntimeError(f"[FAILED_READ_FILE.NO_HINT] Error while reading file:/x/a.csv.gz. SQLSTATE: KD001\n{STACK}")
    found = input_error(file)
    assert found.message == "[FAILED_READ_FILE.NO_HINT] Error while reading file:/x/a.csv.gz."
    assert found.exit_code == 2 and found.fix
    assert input_error(RuntimeError("[CAST_INVALID_INPUT] The value 'B6' cannot be cast. SQLSTATE: 22018")) is not None
    udf = "[PYTHON_EXCEPTION] Traceback (most recent call last):\n  File 'x'\nZeroDivisionError: no\n SQLSTATE: 38000"
    assert input_error(RuntimeError(udf)) is None
    assert input_error(RuntimeError("[INTERNAL_ERROR] a fault of Spark. SQLSTATE: XX000")) is None
