"""Errors of dl_on_spark: each names the thing, the facts and the way out.

The command line turns an error into one panel and its ``exit_code``:
0 done, 2 bad input or configuration (nothing was changed), 3 gate refused,
4 training failed after restarts, 130 cancelled.
"""

from __future__ import annotations

from typing import Any


class DLOnSparkError(Exception):
    """Base of all errors a user may meet.

    ``message`` says what is wrong and names the thing; ``fix`` says the way out.
    """

    exit_code = 4

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        self.message = message
        self.fix = fix
        super().__init__(message if fix is None else f"{message} {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), vars(self)))


def _rebuild(kind: type[DLOnSparkError], state: dict[str, Any]) -> DLOnSparkError:
    """Unpickle any subclass with all it carries, whatever its own ``__init__`` takes."""
    error = kind.__new__(kind)
    DLOnSparkError.__init__(error, state["message"], fix=state["fix"])
    vars(error).update(state)
    return error


class InputError(DLOnSparkError):
    """Bad input: found before or at launch, nothing was changed."""

    exit_code = 2


class ConfigError(InputError):
    """A pipeline.yaml, an option or an argument is wrong."""


class TableError(InputError):
    """A table, a file of it or a filter on it cannot be used."""


class SchemaError(InputError):
    """A schema file is wrong, or a table does not fit its schema."""


class ModelError(InputError):
    """The user's model cannot be trained as it is (not compiled, not a model, wrong inputs)."""


class PreflightError(InputError):
    """The cluster cannot run this job; the message says have, need and the setting to change."""


class MissingExtraError(InputError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package}, which is not installed.",
            fix=f"Run: pip install 'dl_on_spark[{extra}]'",
        )


class DataContractError(DLOnSparkError):
    """More rows broke the checks of a schema than the pipeline allows; nothing was published."""

    exit_code = 2


class GateRefused(DLOnSparkError):
    """The candidate model is not good enough; the current one stays."""

    exit_code = 3


class TrainingFailed(DLOnSparkError):
    """Training ended without a model after all restarts."""

    exit_code = 4


class Diverged(TrainingFailed):
    """A loss or a weight is no finite number; `step` (over all epochs, from 0) where it is known."""

    def __init__(self, message: str, *, fix: str | None = None, step: int | None = None) -> None:
        way_out = "The last good checkpoint is kept. Lower the learning rate, or look for wrong values in the features."
        super().__init__(message, fix=fix or way_out)
        self.step = step


class CheckpointError(DLOnSparkError):
    """A checkpoint is incomplete, damaged, foreign or cannot be written."""

    exit_code = 4


class CollectiveError(DLOnSparkError):
    """An exchange between ranks failed: names rank, peer, operation and sequence number.

    A *secondary* symptom when a peer died: the launcher shows the peer's own cause first.
    """

    exit_code = 4


class DeadlineExceeded(CollectiveError):
    """A peer did not answer within the deadline."""


class WorkerFailed(DLOnSparkError):
    """A worker ended: rank, host and step, and its traceback (the first cause) where it has one."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        step: int | None = None,
        traceback: str | None = None,
        retryable: bool = True,
        fix: str | None = None,
    ) -> None:
        super().__init__(message, fix=fix)
        self.rank = rank
        self.host = host
        self.step = step
        self.traceback = traceback
        self.retryable = retryable

    def __str__(self) -> str:
        """The worker's own traceback first: it is what the user looks for."""
        said = super().__str__()
        return f"{self.traceback.rstrip()}\n{said}" if self.traceback else said


class Cancelled(DLOnSparkError):
    """The user or the scheduler stopped the run."""

    exit_code = 130
