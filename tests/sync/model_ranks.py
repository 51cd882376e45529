"""What each of two ranks does in `test_models`: kinds of compiled models whose training must be that of one worker."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import keras

from dl_on_spark.collectives import Communicator
from dl_on_spark.sync import Allreduce, LocalSGD, SyncStrategy
from tests.training.worlds import SECOND_LABEL, WEIGHT, alone, build, fit, weights

Made = tuple[Callable[[], Any], dict[str, Any]]


LOCAL = ("float16", "class weights", "two outputs")


def half_precision() -> Any:
    """The usual model, computing in float16; Keras scales its loss itself."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return build(keras.optimizers.SGD(0.1, momentum=0.9), metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")


def two_outputs(*, by_name: bool) -> Callable[[], Any]:
    """Two inputs, a shared layer, two outputs with a loss each."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        x, category = keras.Input((4,), name="x"), keras.Input((), name="category", dtype="int32")
        shared = keras.layers.Dense(4, "tanh")
        hidden = keras.layers.Concatenate()([shared(x), shared(-x), keras.layers.Embedding(5, 2)(category)])
        y = keras.layers.Dense(1, "sigmoid", name="y")(hidden)
        z = keras.layers.Dense(1, name="z")(hidden)
        model = keras.Model([x, category] if by_name else {"x": x, "category": category}, {"y": y, "z": z})
        model.compile(
            keras.optimizers.Adam(0.05),
            loss={"y": "binary_crossentropy", "z": "mse"},
            loss_weights={"y": 1.0, "z": 0.3},
            metrics={"y": ["accuracy"], "z": [keras.metrics.MeanAbsoluteError(name="mae")]},
        )
        return model

    return make


def made() -> dict[str, Made]:
    """By name: what builds the model, and options of `fit`."""

    def weighed() -> Any:
        return build(keras.optimizers.SGD(0.3), weighted_metrics=["accuracy", keras.metrics.AUC(name="auc")])

    return {
        "float16": (half_precision, {}),
        "compiled": (lambda: build(keras.optimizers.SGD(0.1), jit_compile=True, metrics=["accuracy"]), {}),
        "sample weights": (weighed, {"more_fields": WEIGHT}),
        "class weights": (weighed, {"class_weight": {0: 0.2, 1: 3.0}}),
        "two outputs": (two_outputs(by_name=False), {"more_fields": SECOND_LABEL}),
        "a list of inputs": (two_outputs(by_name=True), {"more_fields": SECOND_LABEL}),
    }


def run(comm: Communicator, pipe: Connection) -> dict[Any, Any]:
    """(weights, history) by name; under ("alone", name) those of one process, under ("local", name) of local SGD."""
    found: dict[Any, Any] = {}

    def done(name: Any, among: Communicator, strategy: SyncStrategy, make: Callable[[], Any], options: Any) -> None:
        model = make()
        history = fit(among, model, strategy, epochs=2, validate=True, **options)
        found[name] = weights(model), history
        pipe.send(("done with", str(name)))

    for name, (make, options) in made().items():
        done(name, comm, Allreduce(), make, options)
        if name in LOCAL:
            done(("local", name), comm, LocalSGD(every=3), make, options)
    if comm.rank == 0:
        for name, (make, options) in made().items():
            done(("alone", name), alone(), Allreduce(), make, options)
    return found
