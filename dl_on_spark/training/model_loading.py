"""The user's model: found by its reference, built, and checked before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dl_on_spark.errors import ConfigError, DLOnSparkError, ModelError
from dl_on_spark.input_pipeline import SamplePlan
from dl_on_spark.lake import Schema
from dl_on_spark.references import load_function, raised_in

# An odd constant: ranks get seeds far from each other.
_SEED_STRIDE = 0x9E3779B1


def load_model_builder(reference: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function behind ``"module:function"``, or the function itself. Raises `ModelError`."""
    if callable(reference):
        return reference
    try:
        return load_function(reference)
    except ConfigError as error:
        raise ModelError(f"model {error.message}", fix=error.fix) from error


def build(
    builder: Callable[..., Any],
    schema: Schema,
    plan: SamplePlan | None = None,
    *,
    alone: bool = False,
    weighted: bool = False,
) -> keras.Model:
    """Call the builder, with ``schema``, ``global_batch_size`` and ``steps_per_epoch`` where it has such a parameter.

    Raises `ModelError` when it raises, with its file and line, and unless it gives a compiled `keras.Model`
    whose loss is a mean over rows; a worker that is ``alone`` has nothing to average, and any loss will do.
    ``weighted``: rows have weights that are in no field of the schema.
    """
    known: dict[str, Any] = {"schema": schema}
    if plan is not None:
        known.update(global_batch_size=plan.global_batch_size, steps_per_epoch=plan.steps_per_epoch)
    asked = inspect.signature(builder).parameters
    name = getattr(builder, "__qualname__", str(builder))
    try:
        model = builder(**{parameter: value for parameter, value in known.items() if parameter in asked})
    except (DLOnSparkError, MemoryError, ConnectionError, TimeoutError, tf.errors.ResourceExhaustedError):
        raise  # ours, or of the machine: the next attempt may do better
    except Exception as error:
        raise ModelError(
            f"the model builder {name} raised {type(error).__name__}: {error}{raised_in(error)}.",
            fix="Mend the builder: it is called before the first step, on every worker.",
        ) from error
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"{name} returned {type(model).__name__}, not a keras.Model.", fix="Return the compiled model."
        )
    if not model.compiled or model.optimizer is None:
        raise ModelError(
            f"the model of {name} is not compiled.",
            fix="Call model.compile(optimizer=..., loss=..., metrics=[...]) before it is returned.",
        )
    for attribute, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer:
            raise ModelError(
                f"the model of {name} has a second optimizer, {attribute!r}; gradients and checkpoints know one.",
                fix="Give compile the one optimizer that trains all weights.",
            )
    if not schema.labels and model.loss is not None and type(model).train_step is keras.Model.train_step:
        raise ModelError(
            f"the model of {name} has a loss, but {schema.source} has no label to compare with.",
            fix="Give one field `role: label`.",
        )
    refused = {"sum", "none", None}
    if schema.weight is not None or weighted:
        refused.add("mean_with_sample_weight")  # divides by the rank's weights, not by its rows
    for loss in [] if alone else keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction in refused:
            raise ModelError(
                f"the loss of {name} has reduction={reduction!r}; gradients of workers are averaged over rows.",
                fix="Use the default reduction 'sum_over_batch_size' and scale the learning rate instead.",
            )
    return model


def check_inputs(model: keras.Model, features: Iterable[str]) -> None:
    """Raise `ModelError` when a functional model asks for an input that is not among `features`."""
    try:
        asked = model.input
    except (AttributeError, ValueError):  # a subclassed model: its call takes what it likes
        return
    names = list(asked) if isinstance(asked, dict) else [tensor.name for tensor in keras.tree.flatten(asked)]
    known = list(features)
    missing = [name for name in names if name not in known]
    if missing:
        raise ModelError(
            f"the model has the input {missing[0]!r}, which is no feature of the schema.",
            fix=f"Take the inputs from schema.keras_inputs(); the features are {', '.join(known)}.",
        )


def offset_seeds(model: keras.Model, rank: int) -> None:
    """Give each rank its own random state (dropout), the same ones in every run of the same seed."""
    known = {id(variable) for variable in model.weights}
    for variable in model.non_trainable_variables:
        if id(variable) not in known and rank:
            state = np.asarray(variable).astype(np.uint64)
            state[..., 0] = (state[..., 0] + rank * _SEED_STRIDE) % 2**32
            variable.assign(state.astype(np.uint32))
