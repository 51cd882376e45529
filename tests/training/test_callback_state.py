"""Callbacks go on where a checkpoint left them: early stopping's patience, a plateau's waiting, the best weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from dl_on_spark.training.callback_state import CallbackState

LOSSES = [5.0, 4.0, 4.1, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4]


class Own(keras.callbacks.Callback):
    """Counts epochs and remembers their losses; ``factor`` is configuration."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.seen, self.last = factor, 0, np.float32(0)
        self.losses: list[float] = []
        self.opened = object()  # nothing that can be kept

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        self.seen, self.last = self.seen + 1, np.float32(logs["loss"])
        self.losses = [*self.losses, logs["loss"]]


def _model() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def _callbacks(factor: float = 1.0) -> list[Any]:
    return [
        keras.callbacks.EarlyStopping("loss", patience=4, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=2, factor=0.5),
        Own(factor),
    ]


def _run(model: Any, callbacks: list[Any], losses: list[float], first: int, saved: Any = None) -> tuple[int, Any]:
    """Epochs of these losses; where it stopped, and the state after the last."""
    keeper = CallbackState(callbacks, saved)
    every = keras.callbacks.CallbackList([*callbacks, keeper], model=model)
    every.on_train_begin()
    epoch = first
    for epoch in range(first, len(losses)):
        model.set_weights([np.full((2, 1), float(epoch)), np.zeros(1)])
        every.on_epoch_end(epoch, {"loss": losses[epoch]})
        if model.stop_training:
            break
    return epoch, keeper.state()


@pytest.mark.parametrize("cut", range(1, len(LOSSES)))
def test_a_resumed_run_stops_and_slows_down_where_the_undisturbed_one_does(cut: int) -> None:
    calm, callbacks = _model(), _callbacks()
    stopped, _ = _run(calm, callbacks, LOSSES, 0)
    first, before = _model(), _callbacks()
    _, saved = _run(first, before, LOSSES[:cut], 0)
    second, after = _model(), _callbacks()
    second.optimizer.learning_rate = first.optimizer.learning_rate  # a checkpoint of its own keeps it
    assert _run(second, after, LOSSES, cut, saved)[0] == stopped == 8
    assert float(second.optimizer.learning_rate) == float(calm.optimizer.learning_rate) == 0.125
    assert after[0].best_epoch == callbacks[0].best_epoch == 4
    assert (after[2].seen, after[2].losses) == (callbacks[2].seen, callbacks[2].losses)
    np.testing.assert_array_equal(after[0].best_weights[0], callbacks[0].best_weights[0])


def test_configuration_is_that_of_the_resumed_runs_code() -> None:
    _, saved = _run(_model(), _callbacks(factor=1.0), LOSSES[:2], 0)
    after = _callbacks(factor=2.0)
    after[0].patience = 9
    _run(_model(), after, LOSSES[:2], 2, saved)
    assert after[2].factor == 2.0 and after[0].patience == 9 and after[2].seen == 2


def test_other_callbacks_begin_anew_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    _, saved = _run(_model(), _callbacks(), LOSSES[:3], 0)
    alone = [Own(1.0)]
    _run(_model(), alone, LOSSES[:3], 3, saved)
    assert alone[0].seen == 0 and "they begin anew" in caplog.text


def test_callbacks_that_keep_nothing_leave_nothing() -> None:
    assert _run(_model(), [keras.callbacks.LambdaCallback()], LOSSES, 0)[1] == {}
    assert CallbackState([]).state() == {}
