"""Model builders of the tests of ml; imported by the workers."""

from __future__ import annotations


def build_on_vector(schema):
    """A classifier of two classes on the one column "features"."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = schema.keras_inputs()
    hidden = keras.layers.Dense(6, "tanh")(inputs["features"])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    return model


def build_on_columns(schema):
    """A regression on scalar columns."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = schema.keras_inputs()
    joined = keras.layers.Concatenate()(
        [keras.layers.Reshape((1,))(keras.ops.cast(tensor, "float32")) for tensor in inputs.values()]
    )
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    return model


def build_three_classes(schema):
    import keras

    inputs = schema.keras_inputs()
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(inputs["features"]))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def build_failing(schema):
    raise RuntimeError("no such layer")
