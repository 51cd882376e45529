"""What each of two ranks does in `test_two_ranks`: every strategy on the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.sync import (
    Allreduce,
    LocalSGD,
    Momentum,
    Nesterov,
    Quadratic,
    Stepped,
    StepRows,
    SyncSession,
    SyncStrategy,
)
from tests.training.worlds import PLAN, alone, build, fit, weights

ROUND = 100  # longer than an epoch, so that an epoch is one round
OUTER = {"momentum": Momentum(0.9, 0.5), "nesterov": Nesterov(0.7, 0.9)}


@dataclass(frozen=True)
class Silent(SyncStrategy):
    """Ranks that never exchange."""

    def start(self, model: Any, comm: Communicator, rows: StepRows) -> SyncSession:
        return _SilentSession()


class _SilentSession(SyncSession):
    replicas_identical = False

    def steps_until_exchange(self, step: int) -> int | None:
        return None

    def after_steps(self, step: int) -> None:
        return

    def finish_epoch(self, step: int) -> None:
        return


def models() -> dict[str, Any]:
    """Models whose steps on two ranks must be those of one."""
    import keras

    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = 3.0 * self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"own_loss": loss}

    class TwoSteps(keras.Model):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            return {**logs, **super().train_step(data)}

    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    return {
        "heavy ball": lambda: build(keras.optimizers.SGD(0.1, momentum=0.9)),
        "adam, clipped": lambda: build(keras.optimizers.Adam(0.01, global_clipnorm=0.1)),
        "loss scale": lambda: build(scaled),
        "own step": lambda: build(kind=OwnStep),
        "two steps a batch": lambda: build(kind=TwoSteps),
    }


def run(comm: Communicator, pipe: Connection) -> dict[str, Any]:
    """Weights after training, by what was trained; under ("alone", name) those of one process (rank 0 only)."""
    found: dict[Any, Any] = {}

    def done(name: Any, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", str(name)))

    def trained(strategy: SyncStrategy, model: Any = None, among: Communicator = comm, **options: Any) -> Any:
        model = build() if model is None else model
        fit(among, model, strategy, **options)
        return weights(model)

    for name, make in models().items():
        model = make()
        done(name, trained(Allreduce(), model))
        found[name, "wrapped"] = "apply" in vars(model.optimizer)
    done("past the optimizer", _refusal(lambda: trained(Allreduce(), build(kind=past_optimizer()))))
    done("frozen", [trained(s, _frozen())[:3] for s in (Allreduce(), LocalSGD(every=1))])
    done("small buckets", trained(Allreduce(bucket_mb=1e-4)))
    done("allreduce", trained(Allreduce()))
    done("every step", trained(LocalSGD(every=1)))
    done("local", trained(LocalSGD(every=3)))
    done("stepped", _rounds_seen(comm, LocalSGD(every=Stepped(((0, 2), (PLAN.steps_per_epoch, 4))))))
    done("quadratic", _rounds_seen(comm, LocalSGD(every=Quadratic(2, 0.2))))
    done("outer that averages", trained(LocalSGD(every=3, outer=Nesterov(1.0, 0.0))))
    done("synchronous at first", trained(LocalSGD(every=ROUND, outer=Nesterov(), start_at=2 * PLAN.steps_per_epoch)))
    for name, outer in OUTER.items():
        done(name, trained(LocalSGD(every=ROUND, outer=outer)))
        done(("rounds", name), _rounds(comm, outer))
    done("batch norm", trained(Allreduce(), build(batch_norm=True)))
    done("batch norm, local", trained(LocalSGD(every=3), build(batch_norm=True)))
    still = {"epochs": 1}
    done("statistics", trained(Allreduce(), _still(), **still))
    done("statistics, local", trained(LocalSGD(every=ROUND), _still(), **still))
    done("own statistics", trained(Silent(), _still(), **still))
    if comm.rank == 0:
        for name, make in models().items():
            done(("alone", name), trained(Allreduce(), make(), alone()))
        done(("alone", "allreduce"), trained(Allreduce(), None, alone()))
    return found


def past_optimizer() -> Any:
    """A kind of model that updates its weights by hand."""
    import keras

    class Past(keras.Model):
        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for grad, variable in zip(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True
            ):
                variable.assign_sub(0.1 * tf.convert_to_tensor(grad))
            return {"own_loss": loss}

    return Past


def _refusal(action: Any) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def _frozen() -> Any:
    """All weights but the output's stay as they are."""
    import keras

    model = build()
    for layer in model.layers[:-1]:
        layer.trainable = False
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


def _still() -> Any:
    """Weights stay where they are; batch-norm statistics follow the rank's rows."""
    import keras

    return build(keras.optimizers.SGD(0.0), batch_norm=True)


def _rounds_seen(comm: Communicator, strategy: LocalSGD) -> list[int]:
    """Steps at which the replicas agree; a callback halves the learning rate when the first epoch has ended."""
    import keras

    model, agreed = build(), []

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.05

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            every = comm.allgather(np.concatenate([w.reshape(-1) for w in weights(model)]))
            if (every == every[0]).all():
                agreed.append(int(model.optimizer.iterations.numpy()))

    fit(comm, model, strategy, callbacks=[Halve()], steps_per_execution=1)
    return agreed


def _rounds(comm: Communicator, outer: Momentum | Nesterov) -> list[np.ndarray]:
    """The formulas of the papers in NumPy, on replicas that trained alone in each round."""
    model = build()
    steps, rank, world = PLAN.steps_per_epoch, comm.rank, comm.world_size
    share = sum(PLAN.rank_rows(step, rank, world) for step in range(steps)) / PLAN.rows
    start = [w.astype(np.float64) for w in weights(model)]
    velocity = [np.zeros_like(w) for w in start]
    for epoch in range(2):
        fit(comm, model, Silent(), start=Cursor(epoch, 0), epochs=epoch + 1)
        for i, own in enumerate(weights(model)):
            mean = own.astype(np.float64) * share
            comm.allreduce(mean)
            difference = start[i] - mean
            velocity[i] = outer.momentum * velocity[i] + difference
            nesterov = isinstance(outer, Nesterov)
            ahead = difference + outer.momentum * velocity[i] if nesterov else velocity[i]
            start[i] = start[i] - outer.lr * ahead
        model.set_weights([w.astype(np.float32) for w in start])
    return start
