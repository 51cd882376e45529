"""A schema's features as inputs of a Keras model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dl_on_spark.lake.schema import Schema

if TYPE_CHECKING:
    import keras


def inputs_of(schema: Schema) -> dict[str, keras.KerasTensor]:
    """One ``keras.Input`` a feature (and one a null indicator), by name, as the reader feeds it."""
    import keras

    inputs = {}
    for field in schema.features:
        shape, dtype = field.tensor_spec()
        inputs[field.name] = keras.Input(shape, name=field.name, dtype=dtype)
        if field.nulls == "indicator":
            name = f"{field.name}_is_null"
            inputs[name] = keras.Input(shape, name=name, dtype="float32")
    return inputs
