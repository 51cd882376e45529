"""What a synchronization strategy is: a frozen description, and the session it starts in a worker."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.input_pipeline import SamplePlan

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StepRows:
    """Rows of each step, known to all ranks from the plan. Steps count over all epochs."""

    plan: SamplePlan
    rank: int
    world_size: int

    def rank_rows(self, first: int, last: int) -> int:
        """Rows of this rank in the steps `first` to `last` (exclusive)."""
        per_epoch = self.plan.steps_per_epoch
        return sum(self.plan.rank_rows(step % per_epoch, self.rank, self.world_size) for step in range(first, last))

    def share(self, first: int, last: int) -> float:
        """This rank's share of all rows of the steps `first` to `last` (exclusive)."""
        per_epoch = self.plan.steps_per_epoch
        return self.rank_rows(first, last) / sum(self.plan.step_rows(step % per_epoch) for step in range(first, last))

    def weight(self, first: int, last: int) -> float:
        """`share` times the number of ranks: 1 where all ranks have the same rows, and 1 on average."""
        per_epoch = self.plan.steps_per_epoch
        rows = sum(self.plan.step_rows(step % per_epoch) for step in range(first, last))
        return self.rank_rows(first, last) * self.world_size / rows


class SyncStrategy(ABC):
    """When workers exchange what. Instances are frozen; `str` gives the text that `parse_sync` reads."""

    def check(self, world_size: int) -> None:  # noqa: B027 - most strategies take any number of workers
        """Raise `ConfigError` where the strategy and this number of workers do not go together."""

    @abstractmethod
    def start(self, model: keras.Model, comm: Communicator, rows: StepRows) -> SyncSession:
        """Begin in a worker whose `model` is built and equal on all ranks."""


class SyncSession(ABC):
    """A strategy at work in one worker. Steps count over all epochs: the number of steps done."""

    #: Whether optimizer state is equal on all ranks, so that rank 0's checkpoint serves all.
    replicas_identical: bool
    #: Whether the exchange is part of the step's graph, which XLA then cannot compile.
    in_graph: bool = False
    #: The session's own error: TensorFlow turns it into text, or wraps it.
    failure: BaseException | None = None

    @abstractmethod
    def steps_until_exchange(self, step: int) -> int | None:
        """Steps from `step` to the next exchange between `tf.function` calls; None when there is none."""

    @abstractmethod
    def after_steps(self, step: int) -> None:
        """Exchange where that is due after `step` steps."""

    @abstractmethod
    def finish_epoch(self, step: int) -> None:
        """An epoch or a checkpoint ends after `step` steps: until the next step, the model is the published one.

        Its weights are the same bits on all ranks.
        """

    def before_steps(self, step: int) -> None:  # noqa: B027 - most strategies train what they publish
        """Steps come next, the first of them after `step` steps."""

    def begin_step(self) -> None:  # noqa: B027 - most strategies need nothing here
        """A step is traced, or run eagerly, from here on."""

    def end_step(self) -> None:  # noqa: B027 - most strategies need nothing here
        """The step is traced, or run. Raises `ModelError` where the strategy had no part in it but must."""

    def set_step(self, step: int) -> None:  # noqa: B027 - most strategies need nothing here
        """Go on after `step` steps, as a resumed run does."""

    def metrics(self) -> dict[str, float]:
        """What an epoch's logs say of the strategy, by name: the same on all ranks."""
        return {}

    def state(self) -> Arrays:
        """What a checkpoint keeps of this rank, beside weights and optimizer. Called after `finish_epoch`."""
        return {}

    def load_state(self, state: Arrays) -> None:  # noqa: B027 - most strategies need nothing here
        """Take what `state` gave; the model has the checkpoint's weights already, `set_step` follows."""

    def close(self) -> None:  # noqa: B027 - most strategies need nothing here
        """Leave the optimizer as it was."""


class FlatVariables:
    """Variables as one flat float array, for one exchange of all of them.

    Reading and writing are one `tf.function` call each: an eager operation a variable would cost more than
    the exchange of a small model.
    """

    def __init__(self, variables: list[Any]) -> None:
        self.variables = variables
        wide = any(str(v.dtype) == "float64" for v in variables)
        self.dtype = np.dtype(np.float64 if wide else np.float32)
        self._sizes = [math.prod(v.shape) for v in variables]
        self._read: Any = None
        self._write: Any = None
        if variables:
            self._read, self._write = self._functions()

    def read(self) -> npt.NDArray[Any]:
        """Values of all variables, one after the other: shape (sum of sizes,)."""
        if self._read is None:
            return np.zeros(0, self.dtype)
        return np.array(self._read())

    def write(self, flat: npt.NDArray[Any]) -> None:
        """Assign what `read` gave."""
        if self._write is not None:
            self._write(flat)

    def assign(self, flat: Any) -> None:
        """Assign a flat tensor; as part of a graph."""
        import tensorflow as tf

        for variable, part in zip(self.variables, tf.split(flat, self._sizes), strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))

    def _functions(self) -> tuple[Any, Any]:
        import tensorflow as tf

        def read() -> Any:
            return tf.concat([tf.reshape(tf.cast(v.value, self.dtype), [-1]) for v in self.variables], 0)

        signature = [tf.TensorSpec([sum(self._sizes)], self.dtype)]
        return tf.function(read), tf.function(self.assign, input_signature=signature)


def running_statistics(model: keras.Model) -> list[Any]:
    """Float weights made to follow the data, such as batch-norm statistics; no frozen layers, no random state."""
    following = {id(v) for layer in model._flatten_layers() for v in layer._non_trainable_variables}
    return [v for v in model.weights if id(v) in following and "float" in str(v.dtype)]


class AgreedStatistics:
    """The model's `running_statistics`: local to a rank while it trains, then the mean over all rows."""

    def __init__(self, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        self._variables = FlatVariables(running_statistics(model))
        self._comm, self._rows = comm, rows
        self._agreed = 0  # steps done when they last agreed

    def agree(self, step: int) -> None:
        """Mean of all ranks, weighted by their rows since the ranks last agreed; `step` steps are done."""
        if self._comm.world_size > 1 and self._variables.variables and step > self._agreed:
            mean = self._variables.read() * self._variables.dtype.type(self._rows.share(self._agreed, step))
            self._comm.allreduce(mean)
            self._variables.write(mean)
        self._agreed = step

    def set_step(self, step: int) -> None:
        """They agree after `step` steps, as in a checkpoint."""
        self._agreed = step
