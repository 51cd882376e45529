"""Small tables, models and runs for tests of the step loop, on one rank or on several."""

from __future__ import annotations

from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import Cursor, SamplePlan
from dl_on_spark.sync import StepRows, SyncStrategy

ROWS, BATCH = 203, 32  # seven steps; the last has 11 rows, 7 and 4 on two ranks
START = Cursor(0, 0)
PLAN = SamplePlan.create([ROWS], num_workers=2, global_batch_size=BATCH, seed=None)


def columns() -> dict[str, np.ndarray]:
    """All rows: x (rows, 4), category (rows,), y (rows,)."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    category = rng.integers(0, 5, ROWS).astype(np.int32)
    y = (x.sum(1) + category - 2 + rng.normal(size=ROWS) > 0).astype(np.float32)
    return {"x": x, "category": category, "y": y}


def dataset(rank: int, world_size: int, next_cursor: Any) -> Any:
    """This rank's part of every global batch, from the cursor on."""
    import tensorflow as tf

    table = columns()

    def batches() -> Any:
        for step in range(next_cursor().step, PLAN.steps_per_epoch):
            counts = [PLAN.rank_rows(step, r, world_size) for r in range(world_size)]
            start = PLAN.rows_before(step) + sum(counts[:rank])
            part = {name: values[start : start + counts[rank]] for name, values in table.items()}
            yield {"x": part["x"], "category": part["category"]}, part["y"]

    features = {"x": tf.TensorSpec((None, 4), tf.float32), "category": tf.TensorSpec((None,), tf.int32)}
    return tf.data.Dataset.from_generator(batches, output_signature=(features, tf.TensorSpec((None,), tf.float32)))


def build(optimizer: Any = None, *, batch_norm: bool = False, kind: Any = None, **compile_options: Any) -> Any:
    """An embedding (a sparse gradient), an L2 penalty, and batch normalization or a custom `train_step` if asked."""
    import keras

    keras.utils.set_random_seed(11)
    x, category = keras.Input((4,), name="x"), keras.Input((), name="category", dtype="int32")
    hidden = keras.layers.Concatenate()([x, keras.layers.Embedding(5, 3)(category)])
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))(hidden)
    if batch_norm:
        hidden = keras.layers.BatchNormalization(momentum=0.8)(hidden)
    output = keras.layers.Dense(1, "sigmoid")(hidden)
    model = (kind or keras.Model)({"x": x, "category": category}, output)
    options = {"loss": "binary_crossentropy", **compile_options}
    model.compile(optimizer or keras.optimizers.SGD(0.1), **options)
    return model


def fit(
    comm: Communicator,
    model: Any,
    strategy: SyncStrategy,
    *,
    epochs: int = 2,
    start: Cursor = START,
    validate: bool = False,
    restore: Any = lambda session: None,
    **options: Any,
) -> dict[str, list[float]]:
    """`fit_worker` on this rank's rows; ``restore`` is called with the session before the first step."""
    import tensorflow as tf

    from dl_on_spark.training.keras_loop import CursorBox, fit_worker
    from dl_on_spark.training.state import build_variables

    rank, world = comm.rank, comm.world_size
    box = CursorBox(start)
    rows = dataset(rank, world, lambda: box.cursor)
    build_variables(model, rows.element_spec)
    session = strategy.start(model, comm, StepRows(PLAN, rank, world))
    if validate:
        held_out = dataset(rank, world, lambda: Cursor(0, 0))
        options["validation"] = held_out.apply(tf.data.experimental.assert_cardinality(PLAN.steps_per_epoch))
    try:
        restore(session)
        history: dict[str, list[float]] = fit_worker(
            model,
            rows,
            plan=PLAN,
            comm=comm,
            session=session,
            epochs=epochs,
            start=start,
            cursor_box=box,
            **{"steps_per_execution": 3, **options},
        )
        return history
    finally:
        session.close()


def weights(model: Any) -> list[np.ndarray]:
    """Copies of all weights, batch-norm statistics included."""
    return [np.array(v) for v in model.weights]


def alone() -> Communicator:
    """A world of one."""
    return Communicator.connect(0, 1, "")
