"""Small models and callbacks for training tests; imported by the workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

FEATURES = ("a", "b")


def build_model():
    import keras

    inputs = {name: keras.Input((), name=name) for name in FEATURES}
    hidden = keras.layers.Concatenate()([keras.layers.Reshape((1,))(tensor) for tensor in inputs.values()])
    hidden = keras.layers.Dense(8, "tanh")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(
        keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
    )
    return model


def build_for_large_batches(global_batch_size, steps_per_epoch):
    import keras

    from dl_on_spark.training.optimizers import Lars
    from dl_on_spark.training.schedules import large_batch_rate

    inputs = {name: keras.Input((), name=name) for name in FEATURES}
    hidden = keras.layers.Concatenate()([keras.layers.Reshape((1,))(tensor) for tensor in inputs.values()])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(8, "tanh")(hidden)))
    rate = large_batch_rate(1.0, base_batch=32, batch=3 * global_batch_size, warm_up_steps=steps_per_epoch)
    model.compile(Lars(rate, trust=0.02, gradient_accumulation_steps=3), "binary_crossentropy")
    return model


def build_with_dropout_and_batch_norm():
    import keras

    inputs = {name: keras.Input((), name=name) for name in FEATURES}
    hidden = keras.layers.Concatenate()([keras.layers.Reshape((1,))(tensor) for tensor in inputs.values()])
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(hidden))
    hidden = keras.layers.Dropout(0.3, seed=3)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "binary_crossentropy")
    return model


def build_uncompiled():
    import keras

    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def build_with_unknown_input():
    import keras

    inputs = {name: keras.Input((1,), name=name) for name in ("a", "c")}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values()))))
    model.compile("sgd", "mse")
    return model


def build_no_model():
    return {"not": "a model"}


def build_diverging():
    import keras

    inputs = {name: keras.Input((), name=name) for name in FEATURES}
    joined = keras.layers.Concatenate()([keras.layers.Reshape((1,))(tensor) for tensor in inputs.values()])
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile(keras.optimizers.SGD(1e20), "mse")
    return model


def build_with_logarithm():
    """No number for rows with b below -10."""
    import keras

    inputs = {name: keras.Input((), name=name) for name in FEATURES}
    logarithm = keras.layers.Lambda(lambda b: keras.ops.log(b + 10.0), output_shape=())(inputs["b"])
    hidden = keras.layers.Concatenate()([keras.layers.Reshape((1,))(t) for t in (inputs["a"], logarithm)])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


def build_failing():
    raise ValueError("the user's own mistake")


def kill_once(marker: str, rank_to_kill: int, step: int):
    """Callbacks that kill `rank_to_kill` with SIGKILL at `step`, the first time only."""

    def callbacks(rank: int):
        import keras

        class Kill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if rank == rank_to_kill and batch >= step and not Path(marker).exists():
                    Path(marker).touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return [Kill()]

    return callbacks


def hang_at(mark: str, step: int):
    """Callbacks that leave a mark at `step` of rank 0 and never go on."""

    def callbacks(rank: int):
        import keras

        class Hang(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if rank == 0 and batch >= step:
                    Path(mark).touch()
                    signal.pause()

        return [Hang()]

    return callbacks


def raise_on_rank(rank_to_fail: int):
    """Callbacks with an error on one rank, in the middle of an epoch."""

    def callbacks(rank: int):
        import keras

        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if rank == rank_to_fail:
                    raise RuntimeError("user callback broke on purpose")

        return [Fail()]

    return callbacks


def stop_early(patience_epochs: int):
    """Keras's own EarlyStopping, on a metric that never improves enough."""

    def callbacks(rank: int):
        import keras

        return [keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=patience_epochs)]

    return callbacks


def take_over(run_dir: str):
    """Another trainer takes the run over, just before the first epoch's checkpoint."""

    def callbacks(rank: int):
        import keras

        from dl_on_spark.training.run_folder import RunFolder

        class TakeOver(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                RunFolder(run_dir).next_attempt()

        return [TakeOver()]

    return callbacks


def raise_at_an_epochs_end():
    """Callbacks with an error after the first epoch."""

    def callbacks(rank: int):
        import keras

        class Fail(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                raise RuntimeError("user callback broke on purpose")

        return [Fail()]

    return callbacks


def lower_rate():
    """Keras's own callbacks that set the learning rate, at an epoch's begin and at its end."""

    def callbacks(rank: int):
        import keras

        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.8 * rate),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=10.0, patience=1, factor=0.5),
        ]

    return callbacks
