"""A worker's training state as named tensors, and back: what a checkpoint holds of a Keras model.

Weights, optimizer variables and metric variables are named by position and path; a checkpoint is refused
by name when the model in code is no longer the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import ModelError

if TYPE_CHECKING:
    import keras

Arrays = dict[str, npt.NDArray[Any]]


def weights_of(model: keras.Model) -> Arrays:
    """Trainable and non-trainable weights (batch-norm statistics), without random state."""
    return _named("weight", model.weights)


def optimizer_of(model: keras.Model) -> Arrays:
    """The optimizer's variables: iterations, learning rate, slots."""
    return _named("optimizer", model.optimizer.variables)


def random_state_of(model: keras.Model) -> Arrays:
    """States of the seed generators (dropout), which differ from rank to rank."""
    return _named("seed", _seed_variables(model))


def load_weights(model: keras.Model, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Assign what `weights_of` gave."""
    _assign("weight", model.weights, tensors)


def load_optimizer(model: keras.Model, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Assign what `optimizer_of` gave."""
    _assign("optimizer", model.optimizer.variables, tensors)


def load_random_state(model: keras.Model, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Assign what `random_state_of` gave."""
    _assign("seed", _seed_variables(model), tensors)


def with_prefix(prefix: str, tensors: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """`tensors` under names that begin with ``prefix/``."""
    return {f"{prefix}/{name}": value for name, value in tensors.items()}


def of_prefix(prefix: str, tensors: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The tensors of ``prefix/``, under their own names again."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def all_finite(tensors: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Whether no value is NaN or infinite."""
    return all(np.isfinite(value).all() for value in tensors.values() if value.dtype.kind == "f")


def build_variables(model: keras.Model, element_spec: Any) -> None:
    """Create all variables of model and optimizer, so that a checkpoint can be assigned.

    ``element_spec``: of one training batch. The model sees one batch of zeros, which trains nothing.
    """
    import keras
    import tensorflow as tf

    def zeros(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([2, *spec.shape[1:]], spec.dtype)

    batch = tf.nest.map_structure(zeros, element_spec)
    if type(model).train_step is keras.Model.train_step:
        model._symbolic_build(data_batch=batch)  # Keras's own: metrics too
    elif not model.built:
        model(batch[0] if isinstance(batch, tuple) else batch, training=False)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _seed_variables(model: keras.Model) -> list[Any]:
    known = {id(variable) for variable in model.weights}
    return [variable for variable in model.non_trainable_variables if id(variable) not in known]


def _named(prefix: str, variables: Iterable[Any]) -> Arrays:
    return {f"{prefix}/{i:04d}/{v.path}": np.asarray(v) for i, v in enumerate(variables)}


def _assign(prefix: str, variables: Iterable[Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    saved = {name.split("/")[1]: (name, value) for name, value in tensors.items() if name.startswith(f"{prefix}/")}
    variables = list(variables)
    if len(saved) != len(variables):
        raise ModelError(
            f"the checkpoint has {len(saved)} {prefix} tensors, the model {len(variables)}: the model's code changed.",
            fix="Start afresh with resume='never', or use the code that wrote the checkpoint.",
        )
    for i, variable in enumerate(variables):
        name, value = saved[f"{i:04d}"]
        if tuple(value.shape) != tuple(variable.shape):
            raise ModelError(
                f"checkpoint tensor {name} has shape {tuple(value.shape)}, the model's {variable.path} has "
                f"{tuple(variable.shape)}: the model's code changed.",
                fix="Start afresh with resume='never', or use the code that wrote the checkpoint.",
            )
        variable.assign(value)
