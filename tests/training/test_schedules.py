"""Learning rates of large batches, and the numbers of the run that a model builder gets."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from dl_on_spark.errors import ConfigError
from dl_on_spark.input_pipeline import SamplePlan
from dl_on_spark.lake import Schema
from dl_on_spark.training.model_loading import build
from dl_on_spark.training.schedules import WarmUp, large_batch_rate


def rates(schedule: Any, steps: int) -> list[float]:
    return [float(schedule(step)) for step in range(steps)]


def test_the_rate_grows_with_the_batch_and_gradually() -> None:
    schedule = large_batch_rate(0.1, base_batch=256, batch=1024, warm_up_steps=6)
    np.testing.assert_allclose(rates(schedule, 9), [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.4, 0.4], rtol=1e-6)


def test_by_the_square_root_and_at_once() -> None:
    schedule = large_batch_rate(0.1, base_batch=256, batch=1024, rule="square_root")
    np.testing.assert_allclose(rates(schedule, 3), [0.2] * 3, rtol=1e-6)


def test_a_decay_is_scaled_as_a_whole() -> None:
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.01])
    schedule = large_batch_rate(decay, base_batch=10, batch=20, warm_up_steps=2)
    np.testing.assert_allclose(rates(schedule, 7), [0.1, 0.15, 0.2, 0.2, 0.2, 0.02, 0.02], rtol=1e-6)


def test_a_smaller_batch_has_the_smaller_rate_from_the_first_step_on() -> None:
    schedule = large_batch_rate(0.1, base_batch=256, batch=64, warm_up_steps=6)
    np.testing.assert_allclose(rates(schedule, 3), [0.025] * 3, rtol=1e-6)


def test_the_optimizer_steps_by_it() -> None:
    optimizer = keras.optimizers.SGD(large_batch_rate(1.0, base_batch=1, batch=3, warm_up_steps=2))
    variable = keras.Variable(np.zeros(1, np.float32))
    seen = []
    for _ in range(4):
        before = float(variable.numpy()[0])
        optimizer.apply([keras.ops.ones(1)], [variable])
        seen.append(before - float(variable.numpy()[0]))
    np.testing.assert_allclose(seen, [1, 2, 3, 3], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rule": "cubic"}, "cubic"), ({"batch": 0}, "batch=0"), ({"base_batch": 0}, "base_batch=0")],
)
def test_what_is_no_batch_or_rule_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        large_batch_rate(0.1, **{"base_batch": 8, "batch": 16, **options})
    assert caught.value.fix
    with pytest.raises(ConfigError, match="steps=-1"):
        WarmUp(0.1, 2.0, -1)


def test_a_builder_gets_the_numbers_it_has_parameters_for() -> None:
    got: dict[str, int] = {}

    def builder(global_batch_size: int, steps_per_epoch: int) -> keras.Model:
        got.update(batch=global_batch_size, steps=steps_per_epoch)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd")
        return model

    schema = Schema.from_dict({"name": "plain", "fields": {"x": {"type": "float", "role": "feature"}}})
    build(builder, schema, SamplePlan.create([100], num_workers=2, global_batch_size=30, seed=1))
    assert got == {"batch": 30, "steps": 4}
