"""LARS against its formula in NumPy, and in a model file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from dl_on_spark.training.optimizers import Lars
from dl_on_spark.training.schedules import large_batch_rate

RATE, MOMENTUM, DECAY, TRUST = 3.0, 0.8, 0.05, 0.02


def steps_of_formula(
    start: list[np.ndarray], gradients: list[list[np.ndarray]], rates: list[float]
) -> list[np.ndarray]:
    """You, Gitman, Ginsburg 2017, algorithm 1, in float64."""
    weights = [w.astype(np.float64) for w in start]
    velocity = [np.zeros_like(w) for w in weights]
    for step, rate in zip(gradients, rates, strict=True):
        for i, grad in enumerate(step):
            w, g, local = weights[i], grad.astype(np.float64), 1.0
            if w.ndim > 1:
                long, steep = np.linalg.norm(w), np.linalg.norm(g)
                local = TRUST * long / (steep + DECAY * long) if long and steep else 1.0
                g = g + DECAY * w
            velocity[i] = MOMENTUM * velocity[i] + rate * local * g
            weights[i] = w - velocity[i]
    return weights


@pytest.mark.parametrize("warm", [False, True])
def test_steps_are_those_of_the_formula(warm: bool) -> None:
    rng = np.random.default_rng(0)
    start = [rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4,), (2, 2, 3, 5))] + [
        np.zeros((2, 3), "f")
    ]
    gradients = [[rng.normal(size=w.shape).astype(np.float32) for w in start] for _ in range(5)]
    gradients[2][0][:] = 0  # no gradient: no ratio
    rate: Any = large_batch_rate(1.0, base_batch=10, batch=30, warm_up_steps=4) if warm else RATE
    optimizer = Lars(rate, MOMENTUM, DECAY, TRUST)
    variables = [keras.Variable(w) for w in start]
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in step], variables)
    rates = [1.0, 1.5, 2.0, 2.5, 3.0] if warm else [RATE] * 5
    for variable, expected in zip(variables, steps_of_formula(start, gradients, rates), strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=2e-5, atol=2e-6)


def test_a_layer_s_step_does_not_depend_on_the_length_of_its_gradient() -> None:
    start, grad = np.ones((4, 4), np.float32), np.eye(4, dtype=np.float32)
    ends = []
    for length in (1e-3, 1.0, 1e5):
        variable = keras.Variable(start)
        Lars(1.0, weight_decay=0.0).apply([keras.ops.convert_to_tensor(grad * length)], [variable])
        ends.append(variable.numpy())
        np.testing.assert_allclose(np.linalg.norm(start - ends[-1]), 1e-3 * np.linalg.norm(start), rtol=1e-3)
    np.testing.assert_allclose(ends[0], ends[2], rtol=1e-6)


def test_rows_of_an_embedding_are_summed_before_there_is_a_norm() -> None:
    import tensorflow as tf

    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([1, 1]), tf.constant([3, 2]))
    ends = []
    for gradient in (rows, tf.convert_to_tensor(rows)):
        variable = keras.Variable(np.ones((3, 2), np.float32))
        Lars(1.0).apply([gradient], [variable])
        ends.append(variable.numpy())
    np.testing.assert_array_equal(*ends)


def test_a_model_file_holds_optimizer_and_rate(tmp_path: Path) -> None:
    decay = keras.optimizers.schedules.CosineDecay(0.1, 100)
    rate = large_batch_rate(decay, base_batch=256, batch=1024, warm_up_steps=5, rule="square_root")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Lars(rate, 0.7, 0.01, 0.002, gradient_accumulation_steps=2), "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)
    model.save(tmp_path / "model.keras")
    code = (
        "import sys, keras, dl_on_spark.training.optimizers, dl_on_spark.training.schedules\n"
        "o = keras.models.load_model(sys.argv[1]).optimizer\n"
        "print(type(o).__name__, o.momentum, o.layer_decay, o.trust, o.gradient_accumulation_steps,"
        " float(o._learning_rate(3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.keras")],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    *words, at_three = done.stdout.split()
    assert words == ["Lars", "0.7", "0.01", "0.002", "2"]
    np.testing.assert_allclose(float(at_three), float(rate(3)), rtol=1e-6)


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"weight_decay": -1.0}, {"trust": 0.0}])
def test_senseless_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Lars"):
        Lars(**options)
