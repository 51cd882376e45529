"""Small tables, models and runs for tests of the step loop, on one rank or on several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import BlockFeed, Cursor, Preprocessor, SamplePlan
from dl_on_spark.input_pipeline.tf_dataset import dataset_of_blocks
from dl_on_spark.lake import Schema
from dl_on_spark.sync import StepRows, SyncStrategy

ROWS, BATCH = 203, 32  # seven steps; the last has 11 rows, 7 and 4 on two ranks
START = Cursor(0, 0)
FIELDS = {
    "x": {"type": "array<float>", "role": "feature", "shape": [4]},
    "category": {"type": "int", "role": "feature"},
    "y": {"type": "float", "role": "label"},
}
WEIGHT = {"w": {"type": "float", "role": "weight"}}
SECOND_LABEL = {"z": {"type": "float", "role": "label"}}
PREPROCESSOR = Preprocessor(Schema.from_dict({"name": "world", "fields": FIELDS}), None)
PLAN = SamplePlan.create([ROWS], num_workers=2, global_batch_size=BATCH, seed=None)


def columns() -> dict[str, np.ndarray]:
    """All rows: x (rows, 4), category (rows,), y (rows,); and w and z (rows,), which few schemas have."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    category = rng.integers(0, 5, ROWS).astype(np.int32)
    y = (x.sum(1) + category - 2 + rng.normal(size=ROWS) > 0).astype(np.float32)
    w = rng.exponential(size=ROWS).astype(np.float32)
    z = (x[:, 0] + 0.1 * rng.normal(size=ROWS)).astype(np.float32)
    return {"x": x, "category": category, "y": y, "w": w, "z": z}


def blocks(rank: int, world_size: int, first_step: int) -> Iterator[dict[str, np.ndarray]]:
    """This rank's part of every global batch from a step on, each a block of one step."""
    table = columns()
    for step in range(first_step, PLAN.steps_per_epoch):
        counts = [PLAN.rank_rows(step, r, world_size) for r in range(world_size)]
        start = PLAN.rows_before(step) + sum(counts[:rank])
        yield {name: values[None, start : start + counts[rank]] for name, values in table.items()}


def dataset(rank: int, world_size: int, preprocessor: Preprocessor = PREPROCESSOR) -> Any:
    """All steps of an epoch as `tf.data`."""
    return dataset_of_blocks(lambda: blocks(rank, world_size, 0), preprocessor, PLAN.steps_per_epoch)


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
    more_fields: Any = None,
    restore: Any = lambda session: None,
    **options: Any,
) -> dict[str, list[float]]:
    """`fit_worker` on this rank's rows; ``restore`` is called with the session before the first step.

    ``more_fields``: `WEIGHT` or `SECOND_LABEL` among the schema's.
    """
    from dl_on_spark.training.keras_loop import fit_worker
    from dl_on_spark.training.state import build_variables

    rank, world = comm.rank, comm.world_size
    schema = Schema.from_dict({"name": "world", "fields": {**FIELDS, **(more_fields or {})}})
    preprocessor = Preprocessor(schema, None)
    with BlockFeed(lambda epoch, step: blocks(rank, world, step), preprocessor, deadline_s=60) as feed:
        build_variables(model, feed.element_spec)
        session = strategy.start(model, comm, StepRows(PLAN, rank, world))
        if validate:
            options["validation"] = dataset(rank, world, preprocessor)
        try:
            restore(session)
            history: dict[str, list[float]] = fit_worker(
                model,
                feed,
                plan=PLAN,
                comm=comm,
                session=session,
                epochs=epochs,
                start=start,
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
