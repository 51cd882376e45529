"""Metrics of all rows: the variables of a Keras metric are sums, so their sum over ranks is exact.

Loss and accuracy keep (total, count), AUC its confusion counts per threshold: summed over the ranks they
are what one process would hold that saw every row. A metric whose variables are no sums can bring
``merge_states(states) -> None``: it gets, for every rank, the values of its variables in their order, and
assigns the merged ones. State after ``reset_state`` must change nothing when it is merged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Arrays = dict[str, npt.NDArray[Any]]
logger = logging.getLogger(__name__)


def merge_over_ranks(model: keras.Model, comm: Communicator) -> Callable[[], None]:
    """Let Keras's `fit` and `evaluate` report the metrics of all rows; returns what undoes it.

    Keras asks for final values at an epoch's end and after an evaluation, which all ranks reach at the same
    points; only there are variables exchanged. A custom ``train_step`` whose logs are not the model's
    metrics gets the mean of its logs over the ranks.
    """
    import keras

    own: Callable[[Any], Any] = model._get_metrics_result_or_logs

    def merged(logs: Any) -> Any:
        with _merged_state(model, comm):
            found = own(logs)
            if found is not logs:
                # Values, while the merged state is there: a result may be the variable itself.
                return keras.tree.map_structure(np.array, found)
        return _mean_logs(logs, comm) if isinstance(logs, dict) and logs else found

    if comm.world_size == 1:
        return lambda: None
    object.__setattr__(model, "_get_metrics_result_or_logs", merged)
    return lambda: object.__delattr__(model, "_get_metrics_result_or_logs")


def count_outputs_by_rows(model: keras.Model) -> Callable[[], None]:
    """Let the losses of single outputs be means over rows, as the whole loss is; returns what undoes it.

    Keras means to weight them by a batch's rows, but asks for the static shape, which is not known inside a
    `tf.function`: every batch then counts 1, a rank's 4 rows as much as the other's 7.
    """
    import tensorflow as tf

    compiled = model._compile_loss
    if compiled is None:
        return lambda: None
    own = compiled.call

    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not compiled.built:
            compiled.build(y_true, y_pred)
        rows = tf.shape(tf.nest.flatten(y_pred)[0])[0]
        for tracker in compiled.metrics:
            object.__setattr__(tracker, "update_state", _counting(tracker.update_state, rows))
        try:
            return own(y_true, y_pred, sample_weight)
        finally:
            for tracker in compiled.metrics:
                object.__delattr__(tracker, "update_state")

    object.__setattr__(compiled, "call", call)
    return lambda: object.__delattr__(compiled, "call")


def _counting(update_state: Callable[..., Any], rows: Any) -> Callable[..., Any]:
    return lambda value, sample_weight=None: update_state(value, sample_weight=rows)


def metric_state(model: keras.Model, comm: Communicator) -> Arrays:
    """Metric variables in the middle of an epoch, merged over the ranks, by position and path."""
    with _merged_state(model, comm):
        return {f"{i:04d}/{v.path}": np.array(v) for i, v in enumerate(metric_variables(model))}


def load_metric_state(model: keras.Model, state: Mapping[str, npt.NDArray[Any]], rank: int) -> None:
    """Go on from `metric_state`: rank 0 takes the merged state, the others start afresh.

    A custom ``train_step`` may create its metrics in its first step; then there is nothing to assign to, and
    the epoch's metrics cover the steps after the resume. A warning says so.
    """
    variables = metric_variables(model)
    model.reset_metrics()
    if len(variables) != len(state):
        logger.warning(
            "The checkpoint holds %d metric variables, the model has %d before its first step: "
            "this epoch's metrics cover only the steps from here on.",
            len(state),
            len(variables),
        )
    elif rank == 0:
        by_place = {name.split("/")[0]: value for name, value in state.items()}
        for i, variable in enumerate(variables):
            variable.assign(by_place[f"{i:04d}"])


def metric_parts(model: keras.Model) -> Arrays:
    """This replica's part of the metrics, as `dl_on_spark.sync.tree_sum` puts parts together."""
    custom = {id(v) for metric in _custom_metrics(model) for v in metric.variables}
    found = {}
    for i, v in enumerate(metric_variables(model)):
        value, name = np.array(v), f"{i:04d}/{v.path}"
        if id(v) in custom:
            found[f"stack/{name}"] = value[None]
        else:
            found[f"sum/{name}"] = value.astype(np.float64)
    return found


def load_metric_total(
    model: keras.Model, sums: Mapping[str, npt.NDArray[Any]], stacks: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Let the metrics hold what all replicas' parts came to."""
    load_metric_state(model, {**sums, **stacks}, rank=1)  # counts, and resets
    places = {name.split("/")[0]: value for name, value in {**sums, **stacks}.items()}
    variables = metric_variables(model)
    if len(places) != len(variables):
        return
    place_of = {id(v): f"{i:04d}" for i, v in enumerate(variables)}
    custom = _custom_metrics(model)
    apart = {id(v) for metric in custom for v in metric.variables}
    for variable in variables:
        if id(variable) not in apart:
            variable.assign(places[place_of[id(variable)]])
    for metric in custom:
        states = zip(*(places[place_of[id(v)]] for v in metric.variables), strict=True)
        metric.merge_states([list(state) for state in states])


def metric_variables(model: keras.Model) -> list[Any]:
    """All variables of the model's metrics, each once."""
    found = {id(v): v for metric in model.metrics for v in metric.variables}
    return list(found.values())


@contextlib.contextmanager
def _merged_state(model: keras.Model, comm: Communicator) -> Iterator[None]:
    """Within, the metrics' variables hold what one process would hold that saw all rows."""
    variables = metric_variables(model)
    local = [np.array(v) for v in variables]
    custom = _custom_metrics(model)
    apart = {id(v) for metric in custom for v in metric.variables}
    summable = [(v, value) for v, value in zip(variables, local, strict=True) if id(v) not in apart]
    try:
        for (variable, _), value in zip(summable, _summed([value for _, value in summable], comm), strict=True):
            variable.assign(value)
        for metric in custom:
            _merge_custom(metric, comm)
        yield
    finally:
        for variable, value in zip(variables, local, strict=True):
            variable.assign(value)


def _custom_metrics(model: keras.Model) -> list[Any]:
    """Metrics that merge themselves; those given to `compile` are inside one compound metric of Keras's."""
    leaves = [leaf for metric in model.metrics for leaf in getattr(metric, "metrics", [metric])]
    return list({id(leaf): leaf for leaf in leaves if hasattr(leaf, "merge_states")}.values())


def _summed(values: list[npt.NDArray[Any]], comm: Communicator) -> list[npt.NDArray[Any]]:
    """Sums over the ranks, in float64 on the way: counts stay exact up to 2**53."""
    if not values:
        return []
    flat = np.concatenate([value.astype(np.float64).reshape(-1) for value in values])
    comm.allreduce(flat)
    parts = np.split(flat, np.cumsum([value.size for value in values])[:-1])
    return [part.reshape(v.shape).astype(v.dtype) for part, v in zip(parts, values, strict=True)]


def _merge_custom(metric: Any, comm: Communicator) -> None:
    gathered = [comm.allgather(np.array(v).reshape(-1)) for v in metric.variables]
    metric.merge_states(
        [
            [g[rank].reshape(v.shape) for g, v in zip(gathered, metric.variables, strict=True)]
            for rank in range(comm.world_size)
        ]
    )


def _mean_logs(logs: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    names = sorted(logs)
    values = np.array([float(np.asarray(logs[name])) for name in names])
    comm.allreduce(values)
    return dict(zip(names, (values / comm.world_size).tolist(), strict=True))
