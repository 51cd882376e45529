"""Embeddings of the categories, standardized numbers, three dense layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dl_on_spark import Schema

if TYPE_CHECKING:
    import keras


def build_model(schema: Schema) -> keras.Model:
    """A compiled model over the features of schemas/flight_features.yaml."""
    import keras

    inputs = schema.keras_inputs()
    columns = []
    for name, tensor in inputs.items():
        if name in schema and schema[name].step in {"vocabulary", "bucketize", "hash"}:
            size = schema[name].cardinality
            width = min(16, 1 + size // 4)
            columns.append(keras.layers.Embedding(size, width, name=f"{name}_embedding")(tensor))
        else:
            columns.append(keras.layers.Reshape((1,), name=f"{name}_column")(tensor))
    hidden = keras.layers.Concatenate()(columns)
    for units in (128, 64):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    output = keras.layers.Dense(1, activation="sigmoid", name="delayed")(hidden)
    model = keras.Model(inputs, output, name="flight_delay")
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.BinaryCrossentropy(),
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model
