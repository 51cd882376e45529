"""What each of two ranks does in `test_noise_scale`: models that stand still, so that every gradient is known."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.sync import Allreduce
from tests.training.worlds import PLAN, build, columns, fit

STEPS = PLAN.steps_per_epoch
HALF = 4
MEASURED = Allreduce(noise_scale=True)


def run(comm: Communicator, pipe: Connection) -> dict[str, Any]:
    """By what was done: sums of the estimates of the last epoch, the metric by epoch, and what both should be."""
    import keras

    found: dict[str, Any] = {}

    def done(name: str, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", name))

    def measured(optimizer: Any, strategy: Allreduce = MEASURED, **options: Any) -> tuple[np.ndarray, list[float]]:
        sessions: list[Any] = []
        history = fit(comm, build(optimizer), strategy, restore=sessions.append, **options)
        return sessions[0]._noise.sums, history["noise_scale"]

    still = keras.optimizers.SGD
    done("plain", measured(still(0.0)))
    done("loss scale", measured(keras.optimizers.LossScaleOptimizer(still(0.0), initial_scale=1024.0)))
    done("small buckets", measured(still(0.0), Allreduce(noise_scale=True, bucket_mb=1e-4)))
    done("clipped", measured(still(0.0, global_clipnorm=1e-3)))
    done("accumulated", measured(still(0.0, gradient_accumulation_steps=3), epochs=1))
    done("parts", _in_parts(comm))
    if comm.rank == 0:
        gradients = _gradients()
        done("exact", _estimates(gradients, [[step] for step in range(STEPS)]))
        done("exact, accumulated", _estimates(gradients, [[0, 1, 2], [3, 4, 5]]))
    return found


def _gradients() -> dict[tuple[int, int], np.ndarray]:
    """By step and rank: the gradient of the mean loss over the rank's rows."""
    import tensorflow as tf

    model, table, found = build(), columns(), {}
    for step in range(STEPS):
        at = PLAN.rows_before(step)
        for rank in range(2):
            rows = slice(at, at := at + PLAN.rank_rows(step, rank, 2))
            x = {name: tf.constant(table[name][rows]) for name in ("x", "category")}
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, tf.constant(table["y"][rows]), model(x, training=True))
            grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
            found[step, rank] = np.concatenate([tf.convert_to_tensor(g).numpy().reshape(-1) for g in grads])
    return found


def _estimates(gradients: dict[tuple[int, int], np.ndarray], updates: list[list[int]]) -> np.ndarray:
    """Sums of the estimates of |G|^2 and tr(Sigma), from two equations for each update."""
    sums = np.zeros(2)
    for steps in updates:
        parts = [np.mean([PLAN.shares(s, 2)[rank] * gradients[s, rank] for s in steps], 0) for rank in range(2)]
        own, total = sum(float(p @ p) for p in parts), float(np.square(sum(parts)).sum())
        mean_shares = np.mean([PLAN.shares(s, 2) for s in steps], 0)
        spread = sum(1 / PLAN.step_rows(s) for s in steps) / len(steps) ** 2
        sums += np.linalg.solve([[np.square(mean_shares).sum(), spread], [1.0, spread]], [own, total])
    return sums


def _in_parts(comm: Communicator) -> tuple[float, float]:
    """The metric of a whole epoch, and of one whose second part is a resumed run."""
    import keras

    saved: dict[str, Any] = {}
    sessions: list[Any] = []

    class Save:
        def steps_until_due(self, cursor: Cursor) -> int | None:
            return HALF - cursor.step if cursor.step < HALF else None

        def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
            if cursor == Cursor(0, HALF):
                sessions[0].finish_epoch(HALF)
                saved.update(safetensors.load(safetensors.save(sessions[0].state())))

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            return

    def restore(session: Any) -> None:
        session.load_state(saved)
        session.set_step(HALF)

    def model() -> Any:
        return build(keras.optimizers.SGD(0.0))

    whole = fit(comm, model(), MEASURED, epochs=1, restore=sessions.append, hooks=[Save()])
    resumed = fit(comm, model(), MEASURED, epochs=1, start=Cursor(0, HALF), restore=restore)
    return whole["noise_scale"][0], resumed["noise_scale"][0]
