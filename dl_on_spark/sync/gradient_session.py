"""What stands between Keras's gradients and the optimizer: the base of strategies that exchange in every step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import ModelError
from dl_on_spark.sync.base import AgreedStatistics, StepRows, SyncSession

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator


class GradientSession(SyncSession):
    """Replaces the optimizer's `apply` by `apply_gradients` while it is open; ``own_apply`` is the optimizer's own.

    ``step``: steps of the plan whose gradients this rank has exchanged. ``applied``: how often the step that is being
    traced has applied gradients so far; one that never does is refused, for it trains past the exchange.
    """

    replicas_identical = True

    def __init__(self, name: str, model: keras.Model, comm: Communicator, rows: StepRows) -> None:
        self.name, self.model, self.comm, self.rows = name, model, comm, rows
        self.statistics = AgreedStatistics(model, comm, rows)
        self.optimizer: Any = model.optimizer
        self.step = self.applied = 0
        self.in_graph = comm.world_size > 1
        self.own_apply = self.optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            done = self.apply_gradients(grads, trainable_variables)
            self.applied += 1
            return done

        # On the instance and past Keras's attribute tracking: saving and configuration stay as they are.
        object.__setattr__(self.optimizer, "apply", apply)

    @abstractmethod
    def apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> Any:
        """As the optimizer's `apply`, with what all ranks have to say."""

    def begin_step(self) -> None:
        self.applied = 0

    def end_step(self) -> None:
        if self.in_graph and self.model.trainable_weights and not self.applied:
            self.failure = ModelError(
                f"{self.name}: this model's train_step trains past model.optimizer, so workers would drift apart.",
                fix="Apply the gradients with model.optimizer.apply, or use LocalSGD.",
            )
            raise self.failure

    def steps_until_exchange(self, step: int) -> int | None:
        return None

    def after_steps(self, step: int) -> None:
        return

    def set_step(self, step: int) -> None:
        self.step = step
        self.statistics.set_step(step)

    def close(self) -> None:
        if "apply" in vars(self.optimizer):
            object.__delattr__(self.optimizer, "apply")


def dense(grads: Sequence[Any]) -> list[Any]:
    """Sparse gradients as dense ones; None stays None."""
    import tensorflow as tf

    return [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
