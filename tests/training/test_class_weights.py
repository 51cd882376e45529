"""Class weights: which row counts how much, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dl_on_spark.errors import ConfigError
from dl_on_spark.lake import Schema
from dl_on_spark.training.class_weights import check_class_weight, weigh_classes

FIELDS = {"x": {"type": "float", "role": "feature"}, "y": {"type": "float", "role": "label"}}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.float32([0, 1, 1]), [0.5, 3, 3]),
        (np.int64([0, 1, 2]), [0.5, 3, 1]),
        (np.int32([[1], [-1], [7]]), [3, 1, 1]),
        (np.float32([[0, 1, 0], [1, 0, 0], [0, 0, 1]]), [3, 0.5, 1]),
        (np.array([True, False, True]), [3, 0.5, 3]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_row_counts_by_the_class_of_its_label(labels: np.ndarray, expected: list[float], compiled: bool) -> None:
    weigh = tf.function(weigh_classes, jit_compile=compiled)
    _, y, weights = weigh((tf.zeros(3), tf.constant(labels)), {0: 0.5, 1: 3.0})
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(y, labels)


def _schema(**more: Any) -> Schema:
    return Schema.from_dict({"name": "plain", "fields": {**FIELDS, **more}})


@pytest.mark.parametrize(
    "wrong", [{}, [1, 2], {-1: 1.0}, {0.5: 1.0}, {0: 0.0}, {0: float("inf")}, {0: "much"}, {True: 1.0}]
)
def test_what_maps_no_classes_to_weights_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="class_weight="):
        check_class_weight(wrong, _schema())


def test_two_ways_of_weighing_or_two_labels_are_refused() -> None:
    check_class_weight({0: 1, 1: 2.5}, _schema())
    check_class_weight(None, _schema(w={"type": "float", "role": "weight"}))
    with pytest.raises(ConfigError, match="'w'"):
        check_class_weight({0: 1}, _schema(w={"type": "float", "role": "weight"}))
    with pytest.raises(ConfigError, match="has 2"):
        check_class_weight({0: 1}, _schema(z={"type": "float", "role": "label"}))
