"""Half precision, XLA, weights and several outputs on two real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.collectives.processes import Ranks
from tests.sync import model_ranks
from tests.training.worlds import columns

Found = list[dict[Any, Any]]
NAMES = ["float16", "compiled", "sample weights", "class weights", "two outputs", "a list of inputs"]
TOLERANCE = {"float16": 3e-3}


@pytest.fixture(scope="module")
def found() -> Found:
    with Ranks(2, model_ranks.run, deadline_s=60) as two:
        return two.results()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_metrics_of_two_workers_are_those_of_one(found: Found, name: str) -> None:
    tolerance = TOLERANCE.get(name, 3e-5)
    (ours, history), (alone, expected) = found[0][name], found[0]["alone", name]
    for one, other in zip(ours, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert history.keys() == expected.keys()
    for metric, values in expected.items():
        np.testing.assert_allclose(history[metric], values, rtol=10 * tolerance, err_msg=metric)
    assert history["loss"][1] < history["loss"][0]
    assert "val_loss" in history


@pytest.mark.parametrize("key", [*NAMES, *(("local", name) for name in model_ranks.LOCAL)])
def test_both_ranks_end_with_the_same_bits(found: Found, key: Any) -> None:
    for one, other in zip(found[0][key][0], found[1][key][0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert found[0][key][1] == found[1][key][1]
    assert found[0][key][1]["loss"][1] < found[0][key][1]["loss"][0]


def test_class_weights_are_those_of_keras(found: Found) -> None:
    """Plain Keras, on rows that are weighed by hand."""
    from tests.training.worlds import PLAN

    make, options = model_ranks.made()["class weights"]
    model, table = make(), columns()
    table["w"] = np.where(table["y"] == 1, *(np.float32(options["class_weight"][label]) for label in (1, 0)))
    for _ in range(2):
        for step in range(PLAN.steps_per_epoch):
            rows = slice(PLAN.rows_before(step), PLAN.rows_before(step + 1))
            batch = {name: values[rows] for name, values in table.items()}
            model.train_on_batch({"x": batch["x"], "category": batch["category"]}, batch["y"], batch["w"])
    for one, other in zip(found[0]["class weights"][0], model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
