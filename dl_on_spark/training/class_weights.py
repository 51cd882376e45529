"""Class weights: a row counts by the class of its label, as with ``class_weight`` of Keras's `fit`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dl_on_spark.errors import ConfigError
from dl_on_spark.lake import Schema


def check_class_weight(class_weight: Mapping[int, float] | None, schema: Schema) -> None:
    """Raise `ConfigError` for what is no mapping of classes to weights, or does not go with the schema."""
    if class_weight is None:
        return
    right = isinstance(class_weight, Mapping) and class_weight
    if not right or not all(_is_class(label) and _is_weight(weight) for label, weight in class_weight.items()):
        raise ConfigError(
            f"class_weight={class_weight!r}.", fix="Map classes (from 0 on) to weights above 0: {0: 1.0, 1: 4.0}."
        )
    if len(schema.labels) != 1:
        raise ConfigError(
            f"class_weight needs one label; {schema.source} has {len(schema.labels)}.",
            fix="Give one field `role: weight` instead, computed in the ETL.",
        )
    if schema.weight is not None:
        raise ConfigError(
            f"class_weight and the weight field {schema.weight.name!r} of {schema.source} both weigh the rows.",
            fix="Use one of them, as in Keras.",
        )


def weigh_classes(batch: Any, class_weight: Mapping[int, float]) -> Any:
    """``(x, y, weights)`` for a batch ``(x, y)``; y of shape (rows,), (rows, 1) or one-hot (rows, classes).

    Classes without a weight count 1. For use inside a `tf.function`.
    """
    import tensorflow as tf

    x, y = batch
    classes = y
    if y.shape.rank > 1:
        classes = tf.squeeze(y, -1) if y.shape[-1] == 1 else tf.argmax(y, -1)
    classes = tf.cast(classes if classes.dtype.is_integer else tf.round(tf.cast(classes, tf.float32)), tf.int32)
    others = max(class_weight) + 1
    table = tf.constant([float(class_weight.get(label, 1.0)) for label in range(others)] + [1.0])
    return x, y, tf.gather(table, tf.where((classes >= 0) & (classes < others), classes, others))


def _is_class(label: Any) -> bool:
    return isinstance(label, int) and not isinstance(label, bool) and label >= 0


def _is_weight(weight: Any) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
