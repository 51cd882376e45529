"""Which of several ends is the cause, and what the driver raises for it."""

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dl_on_spark.errors as errors
from dl_on_spark.errors import CollectiveError, DeadlineExceeded, MissingExtraError, ModelError, WorkerFailed
from dl_on_spark.launch.failure import Cause, Failure, first_cause, of_exception, of_exit, to_error

failures = st.builds(
    Failure,
    rank=st.integers(0, 7),
    host=st.just("h"),
    cause=st.sampled_from(Cause),
    message=st.text(),
    step=st.none() | st.integers(0, 99),
    traceback=st.none() | st.text(),
)


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return of_exception(caught, rank=1, host="h", step=4)


@given(st.lists(failures, min_size=1))
def test_the_first_cause_is_the_earliest_of_the_gravest(all_failures):
    chosen = first_cause(all_failures)
    assert chosen.cause == min(failure.cause for failure in all_failures)
    assert chosen is next(failure for failure in all_failures if failure.cause == chosen.cause)


def test_of_values_that_are_no_numbers_the_first_step_explains_the_others():
    told = [
        Failure(0, "h", Cause.EXCEPTION, "nan", step=7, error_type="Diverged"),
        Failure(2, "h", Cause.EXCHANGE, "lost", step=3, error_type="CollectiveError"),
        Failure(1, "h", Cause.EXCEPTION, "nan", step=6, error_type="Diverged"),
    ]
    assert first_cause(told).rank == 1
    found = raised(errors.Diverged("the loss is nan", step=6))
    assert (found.step, found.retryable, found.diverged) == (6, False, True)


@given(failures)
def test_failures_survive_json(failure):
    assert Failure.from_dict(json.loads(json.dumps(failure.to_dict()))) == failure


def test_a_failed_exchange_is_an_echo_also_inside_another_exception():
    assert raised(CollectiveError("lost rank 2")).cause is Cause.EXCHANGE
    assert raised(DeadlineExceeded("rank 2 is silent")).cause is Cause.EXCHANGE
    assert raised(RuntimeError("fit failed"), CollectiveError("lost")).cause is Cause.EXCHANGE
    assert raised(RuntimeError("fit failed")).cause is Cause.EXCEPTION


@pytest.mark.parametrize(
    ("error", "retryable"),
    [(ValueError("x"), False), (OSError("disk"), True), (CollectiveError("x"), True), (MemoryError(), True)],
)
def test_what_another_attempt_would_repeat_is_not_retried(error, retryable):
    assert raised(error).retryable is retryable


def test_bad_input_keeps_its_type_message_and_fix():
    error = to_error(raised(ModelError("not compiled.", fix="Compile it.")))
    assert type(error) is ModelError
    assert (error.message, error.fix) == ("not compiled.", "Compile it.")
    assert type(to_error(raised(MissingExtraError("deltalake", "delta")))) is MissingExtraError


def test_a_users_own_kind_of_bad_input_becomes_its_nearest_base():
    class Mine(ModelError):
        pass

    assert type(to_error(raised(Mine("odd")))) is ModelError


def test_a_worker_cannot_name_a_class_that_is_not_an_input_error():
    forged = Failure(0, "h", Cause.BAD_INPUT, "x", error_type="WorkerFailed")
    assert type(to_error(forged)) is WorkerFailed
    assert errors.WorkerFailed is WorkerFailed


def test_a_signal_is_named_and_the_others_are_mentioned():
    dead = of_exit(-signal.SIGSEGV, "Fatal Python error\n", rank=2, host="node-7", step=9)
    error = to_error(dead, [dead, raised(CollectiveError("lost rank 2"))])
    assert error.message == "worker 2 on node-7 at step 9: was killed by SIGSEGV (seen by the others: worker 1)"
    assert "Fatal Python error" in str(error)
    assert "exit code 3" in of_exit(3, "", rank=0, host="h", step=None).message
