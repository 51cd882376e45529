"""Why a worker ended, and which of several ends is the cause of the others."""

from __future__ import annotations

import math
import signal
import traceback as traceback_module
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

from dl_on_spark import errors
from dl_on_spark.errors import (
    CheckpointError,
    CollectiveError,
    Diverged,
    DLOnSparkError,
    InputError,
    WorkerFailed,
)

_TOLD = 4  # workers that waited, in one message


class Cause(IntEnum):
    """How a worker ended, in the order in which it explains the ends of others.

    An exchange that failed is the echo of a peer's end, so it comes last but for being stopped.
    """

    BAD_INPUT = 0
    EXCEPTION = 1
    KILLED = 2
    LOST = 3
    HUNG = 4
    EXCHANGE = 5
    STOPPED = 6


@dataclass(frozen=True)
class Failure:
    """One worker's end, as plain values that travel as JSON.

    ``error_type`` is a class of ``dl_on_spark.errors`` where one fits, else the exception's own name.
    """

    rank: int
    host: str
    cause: Cause
    message: str
    step: int | None = None
    error_type: str = ""
    fix: str | None = None
    traceback: str | None = None
    retryable: bool = True

    @property
    def diverged(self) -> bool:
        """Whether a loss or a weight was no number."""
        return self.error_type == Diverged.__name__

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Failure:
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        return cls(**{**known, "cause": Cause(values["cause"])})


def of_exception(error: BaseException, *, rank: int, host: str, step: int | None) -> Failure:
    """The failure of a worker whose entry function raised `error`."""
    ours = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), None)
    if isinstance(error, InputError):
        cause = Cause.BAD_INPUT
    elif _is_exchange(error):
        cause = Cause.EXCHANGE
    else:
        cause = Cause.EXCEPTION
    return Failure(
        rank=rank,
        host=host,
        cause=cause,
        message=error.message if isinstance(error, DLOnSparkError) else f"{type(error).__name__}: {error}",
        step=error.step if isinstance(error, Diverged) and error.step is not None else step,
        error_type=ours or type(error).__name__,
        fix=error.fix if isinstance(error, DLOnSparkError) else None,
        traceback="".join(traceback_module.format_exception(error)),
        retryable=cause is Cause.EXCHANGE or isinstance(error, OSError | MemoryError | CheckpointError),
    )


def of_exit(code: int, tail: str, *, rank: int, host: str, step: int | None) -> Failure:
    """The failure of a worker whose process ended by itself or by a signal (negative `code`)."""
    if code < 0:
        name = signal.Signals(-code).name
        message = f"was killed by {name}"
        fix = None
        if name == "SIGKILL":
            fix = "SIGKILL often means that the host ran out of memory: give the executor more, or read less."
    else:
        message = f"ended with exit code {code} before its work was done"
        fix = "Look for a call of exit() in the model or its callbacks."
    shown = f"last lines of the worker's output:\n{tail.rstrip()}" if tail.strip() else None
    return Failure(rank, host, Cause.KILLED, message, step=step, traceback=shown, fix=fix)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others; among equals the one that arrived first.

    A value that is no number spreads from rank to rank with the exchanges, so there it is the one of the least step.
    """
    failures = list(failures)
    first = min(failures, key=lambda failure: failure.cause)  # min keeps the first of equals
    if not first.diverged:
        return first
    return min((one for one in failures if one.diverged), key=lambda one: math.inf if one.step is None else one.step)


def to_error(failure: Failure, others: Iterable[Failure] = ()) -> DLOnSparkError:
    """The exception the driver raises for `failure`.

    Bad input keeps its type (exit code 2: another attempt would find it again); all else is
    :class:`WorkerFailed`.
    """
    kind = getattr(errors, failure.error_type, None)
    if failure.cause is Cause.BAD_INPUT and isinstance(kind, type) and issubclass(kind, InputError):
        error = kind.__new__(kind)
        DLOnSparkError.__init__(error, failure.message, fix=failure.fix)
        return error
    text = f"worker {failure.rank} on {failure.host}{_at(failure.step)}: {failure.message}"
    others = [other for other in others if other.rank != failure.rank]
    echoes = sorted({other.rank for other in others})
    if echoes:
        text += f" (seen by the others: {', '.join(f'worker {rank}' for rank in echoes)})"
    waiting = [other for other in others if other.cause is Cause.EXCHANGE]
    if waiting and failure.cause in {Cause.HUNG, Cause.LOST}:
        told = "; ".join(f"worker {one.rank}{_at(one.step)}: {one.message.rstrip('.')}" for one in waiting[:_TOLD])
        text += f". Who waited: {told}" + (f"; and {len(waiting) - _TOLD} more" if len(waiting) > _TOLD else "")
    return WorkerFailed(
        text if text.endswith((".", ")")) else text + ".",
        rank=failure.rank,
        host=failure.host,
        step=failure.step,
        traceback=failure.traceback,
        retryable=failure.retryable,
        fix=failure.fix,
    )


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _is_exchange(error: BaseException | None) -> bool:
    """Whether `error` is, or was raised from, a failed exchange with a peer.

    TensorFlow turns an exception inside a ``numpy_function`` into its own, with ours in the text.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, CollectiveError):
            return True
        foreign = type(error).__module__.startswith("tensorflow")
        if foreign and any(name in str(error) for name in ("CollectiveError", "DeadlineExceeded: ")):
            return True
        error = error.__cause__ or error.__context__
    return False
