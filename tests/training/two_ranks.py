"""What each of two ranks does in `test_metrics` and `test_keras_loop`."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import CollectiveError
from dl_on_spark.sync import Allreduce, LocalSGD
from tests.training.worlds import alone, build, columns, fit, weights


def peak(name: str = "peak") -> Any:
    """A metric whose state is no sum: the greatest prediction."""
    import keras

    class Peak(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name=name)
            self.top = self.add_variable((), "zeros", name="top")

        def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
            self.top.assign(keras.ops.maximum(self.top, keras.ops.max(prediction)))

        def result(self) -> Any:
            return self.top

        def merge_states(self, states: list[list[np.ndarray]]) -> None:
            self.top.assign(max(state[0] for state in states))

    return Peak()


def measured(rate: float) -> Any:
    import keras

    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="rmse"), peak()]
    return build(keras.optimizers.SGD(rate), metrics=metrics)


def metrics(comm: Communicator, pipe: Connection) -> dict[str, Any]:
    """Histories with fixed weights, on two ranks and (rank 0) on one; and state kept in mid-epoch."""
    from dl_on_spark.training.metrics import load_metric_state, merge_over_ranks, metric_state

    found: dict[str, Any] = {"two": fit(comm, measured(0.0), Allreduce(), epochs=1, validate=True)}
    pipe.send(("done with", "two"))
    if comm.rank == 0:
        found["one"] = fit(alone(), measured(0.0), Allreduce(), epochs=1, validate=True)
        pipe.send(("done with", "one"))

    table, half = columns(), 100
    mine = slice(0, 30) if comm.rank == 0 else slice(30, half)
    rest = slice(half, 120) if comm.rank == 0 else slice(120, None)

    def see(model: Any, rows: slice) -> None:
        x = {"x": table["x"][rows], "category": table["category"][rows]}
        model.test_step((x, table["y"][rows]))

    model = measured(0.0)
    see(model, mine)
    local = [np.array(v) for metric in model.metrics for v in metric.variables]
    state = metric_state(model, comm)
    after = [np.array(v) for metric in model.metrics for v in metric.variables]
    found["untouched"] = all(np.array_equal(a, b) for a, b in zip(local, after, strict=True))
    load_metric_state(model, state, comm.rank)
    see(model, rest)
    undo = merge_over_ranks(model, comm)
    logs = dict.fromkeys(model.get_metrics_result(), 0.0)
    found["resumed"] = {name: float(value) for name, value in model._get_metrics_result_or_logs(logs).items()}
    undo()
    found["undone"] = "_get_metrics_result_or_logs" not in vars(model)
    return found


def loop(comm: Communicator, pipe: Connection) -> dict[str, Any]:
    """Callbacks that stop, and at last a rank that leaves."""
    import keras

    found: dict[str, Any] = {}

    def done(name: str, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", name))

    model = build()
    early = keras.callbacks.EarlyStopping("val_loss", min_delta=0.01, patience=1, restore_best_weights=True)
    history = fit(comm, model, Allreduce(), epochs=30, validate=True, callbacks=[early])
    done("early", (len(history["loss"]), early.best_epoch, weights(model)))

    class StopInEpoch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch >= 4

    for strategy in (LocalSGD(every=100), Allreduce()):
        model = build(batch_norm=True)
        fit(comm, model, strategy, callbacks=[StopInEpoch()])
        done(f"stopped {strategy}", (int(model.optimizer.iterations.numpy()), weights(model)))

    class Leave(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if comm.rank == 1:
                comm.close("left on purpose")

    model = build()
    try:
        fit(comm, model, Allreduce(), callbacks=[Leave()])
    except CollectiveError as error:
        done("error", (type(error).__name__, str(error), "apply" in vars(model.optimizer)))
    return found
