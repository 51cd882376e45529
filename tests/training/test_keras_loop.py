"""Keras's `fit` over our step loop: the same steps, the same callbacks, from any cursor, to any stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dl_on_spark.errors import ModelError
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.lake import Schema
from dl_on_spark.sync import Allreduce, LocalSGD
from tests.collectives.processes import Ranks
from tests.training import two_ranks
from tests.training.worlds import PLAN, alone, build, dataset, fit, weights

STEPS = PLAN.steps_per_epoch


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with Ranks(2, two_ranks.loop, deadline_s=60) as two:
        return two.results()


class Calls:
    """A hook that remembers where it was called, due every ``every`` steps."""

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self.cursors: list[Cursor] = []
        self.epochs: list[int] = []

    def steps_until_due(self, cursor: Cursor) -> int | None:
        return None if self.every is None else self.every - cursor.step % self.every

    def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
        self.cursors.append(cursor)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.epochs.append(epoch)


def assert_close(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_one_worker_trains_as_plain_keras_does() -> None:
    plain, ours = build(metrics=["accuracy"]), build(metrics=["accuracy"])
    expected = plain.fit(dataset(0, 1), epochs=2, verbose=0).history
    history = fit(alone(), ours, Allreduce())
    assert_close(weights(plain), weights(ours))
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    assert int(ours.optimizer.iterations.numpy()) == 2 * STEPS
    assert ours.make_train_function.__func__ is type(ours).make_train_function


def test_a_strategy_without_a_part_in_the_step_is_traced_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *more, **_: said.append(str(text)))
    fit(alone(), build(), LocalSGD(every=4))
    assert not [text for text in said if "AutoGraph" in text]


@pytest.mark.parametrize("per_execution", [1, 4, 100])
def test_callbacks_and_hooks_see_every_execution_of_every_epoch(per_execution: int) -> None:
    import keras

    begins: list[int] = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begins.append(batch))
    hook = Calls(every=3)
    model = build()
    fit(alone(), model, Allreduce(), steps_per_execution=per_execution, callbacks=[callback], hooks=[hook])
    assert begins == 2 * list(range(0, STEPS, per_execution))
    stops = sorted({*range(3, STEPS, 3), *range(per_execution, STEPS, per_execution), STEPS})
    assert hook.cursors == [Cursor(epoch, step) for epoch in range(2) for step in stops]
    assert hook.epochs == [0, 1]
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS


@pytest.mark.parametrize("step", [1, 3, STEPS - 1])
def test_a_run_resumed_in_mid_epoch_ends_with_the_weights_of_an_undisturbed_one(step: int) -> None:
    from dl_on_spark.training import state
    from dl_on_spark.training.metrics import load_metric_state, metric_state

    saved: dict[str, Any] = {}

    class Save(Calls):
        def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
            if cursor == Cursor(1, step):
                saved.update(state.weights_of(calm), **state.optimizer_of(calm))
                saved["metrics"] = metric_state(calm, alone())

    calm, resumed = _with_adam(), _with_adam()
    expected = fit(alone(), calm, Allreduce(), epochs=3, hooks=[Save(every=step)])

    def restore(session: Any) -> None:
        metrics = saved.pop("metrics")
        state.load_weights(resumed, saved)
        state.load_optimizer(resumed, saved)
        load_metric_state(resumed, metrics, rank=0)
        session.set_step(STEPS + step)

    history = fit(alone(), resumed, Allreduce(), epochs=3, start=Cursor(1, step), restore=restore)
    for a, b in zip(weights(calm), weights(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values[1:], rtol=1e-6, err_msg=name)


def _with_adam() -> Any:
    import keras

    return build(keras.optimizers.Adam(0.01), metrics=["accuracy", keras.metrics.AUC(name="auc")])


def test_neither_batch_sizes_nor_numbers_of_steps_trace_the_step_again() -> None:
    import keras

    traces: list[int] = []

    class Counting(keras.Model):
        def train_step(self, data: Any) -> Any:
            traces.append(1)
            return super().train_step(data)

    fit(alone(), build(kind=Counting), LocalSGD(every=2), epochs=3, steps_per_execution=5, hooks=[Calls(every=3)])
    assert len(traces) == 1


def test_callbacks_stop_all_ranks_after_the_same_epoch(found: list[dict[str, Any]]) -> None:
    (epochs, best, first), (other_epochs, other_best, second) = (rank["early"] for rank in found)
    assert (epochs, best) == (other_epochs, other_best)
    assert 1 < epochs < 30
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", ["local_sgd:every=100", "allreduce"])
def test_replicas_agree_after_a_stop_in_mid_epoch(found: list[dict[str, Any]], strategy: str) -> None:
    (steps, first), (_, second) = (rank[f"stopped {strategy}"] for rank in found)
    assert steps == 6 < STEPS
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_error_of_the_exchange_is_raised_as_it_is(found: list[dict[str, Any]]) -> None:
    for rank in found:
        kind, text, wrapped = rank["error"]
        assert kind == "CollectiveError"
        assert "rank" in text
        assert not wrapped
    assert "left on purpose" in found[0]["error"][1]


def _load(loss: Any, schema: Schema, **options: Any) -> Any:
    from dl_on_spark.training.model_loading import build as checked

    return checked(lambda: build(loss=loss), schema, **options)


def test_a_model_with_a_second_optimizer_is_refused_by_the_attribute_s_name() -> None:
    import keras

    from dl_on_spark.training.model_loading import build as checked

    def two_optimizers() -> Any:
        model = build()
        model.critic_optimizer = keras.optimizers.SGD(0.1)
        return model

    fields = {"x": {"type": "float", "role": "feature"}}
    with pytest.raises(ModelError, match="critic_optimizer"):
        checked(two_optimizers, Schema.from_dict({"name": "plain", "fields": fields}))


def test_a_loss_that_is_no_mean_over_rows_is_refused_unless_the_worker_is_alone() -> None:
    import keras

    fields = {"x": {"type": "float", "role": "feature"}, "y": {"type": "float", "role": "label"}}
    schema = Schema.from_dict({"name": "plain", "fields": fields})
    weighted = Schema.from_dict({"name": "weighted", "fields": {**fields, "w": {"type": "float", "role": "weight"}}})
    for reduction in ("sum", "none", None):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        with pytest.raises(ModelError, match="reduction=") as caught:
            _load(loss, schema)
        assert "sum_over_batch_size" in (caught.value.fix or "")
        assert _load(loss, schema, alone=True).compiled
    by_weight = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    assert _load(by_weight, schema).compiled
    with pytest.raises(ModelError, match="mean_with_sample_weight"):
        _load(by_weight, weighted)
