"""Metrics of all rows: the variables of a Keras metric are sums, so their sum over ranks is exact.

Loss and accuracy keep (total, count), AUC its confusion counts per threshold: summed over the ranks they
are what one process would hold that saw every row. A metric whose variables are no sums can bring
``merge_states(states) -> None``, called with every rank's values of its variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import keras

    from dl_on_spark.collectives import Communicator

Arrays = dict[str, npt.NDArray[Any]]


def merge_over_ranks(model: keras.Model, comm: Communicator) -> Callable[[], None]:
    """Let Keras's `fit` and `evaluate` report the metrics of all rows; returns what undoes it.

    Keras asks for final values at an epoch's end and after an evaluation, which all ranks reach at the same
    points; only there are variables exchanged. A custom ``train_step`` whose logs are not the model's
    metrics gets the mean of its logs over the ranks.
    """
    own: Callable[[Any], Any] = model._get_metrics_result_or_logs

    def merged(logs: Any) -> Any:
        variables = _variables(model)
        local = [np.array(v) for v in variables]
        for variable, value in zip(variables, _summed(local, comm), strict=True):
            variable.assign(value)
        _merge_custom(model, comm)
        found = own(logs)
        for variable, value in zip(variables, local, strict=True):
            variable.assign(value)
        if found is logs and isinstance(logs, dict) and logs:
            return _mean_logs(logs, comm)
        return found

    if comm.world_size == 1:
        return lambda: None
    object.__setattr__(model, "_get_metrics_result_or_logs", merged)
    return lambda: object.__delattr__(model, "_get_metrics_result_or_logs")


def metric_state(model: keras.Model, comm: Communicator) -> Arrays:
    """Metric variables in the middle of an epoch, summed over the ranks, by position and path."""
    variables = _variables(model)
    summed = _summed([np.array(v) for v in variables], comm)
    return {f"{i:04d}/{v.path}": value for i, (v, value) in enumerate(zip(variables, summed, strict=True))}


def load_metric_state(model: keras.Model, state: Mapping[str, npt.NDArray[Any]], rank: int) -> None:
    """Go on from `metric_state`: rank 0 takes the sums, the others start at zero."""
    by_place = {name.split("/")[0]: value for name, value in state.items()}
    for i, variable in enumerate(_variables(model)):
        value = by_place[f"{i:04d}"]
        variable.assign(value if rank == 0 else np.zeros_like(value))


def metric_variables(model: keras.Model) -> list[Any]:
    """All variables of the model's metrics, each once."""
    found = {id(v): v for metric in model.metrics for v in metric.variables}
    return list(found.values())


def _variables(model: keras.Model) -> list[Any]:
    custom = {id(v) for metric in model.metrics if hasattr(metric, "merge_states") for v in metric.variables}
    return [v for v in metric_variables(model) if id(v) not in custom]


def _summed(values: list[npt.NDArray[Any]], comm: Communicator) -> list[npt.NDArray[Any]]:
    """Sums over the ranks, in float64 on the way: counts stay exact up to 2**53."""
    if not values:
        return []
    flat = np.concatenate([value.astype(np.float64).reshape(-1) for value in values])
    comm.allreduce(flat)
    parts = np.split(flat, np.cumsum([value.size for value in values])[:-1])
    return [part.reshape(v.shape).astype(v.dtype) for part, v in zip(parts, values, strict=True)]


def _merge_custom(model: keras.Model, comm: Communicator) -> None:
    for metric in model.metrics:
        if hasattr(metric, "merge_states"):
            gathered = [comm.allgather(np.array(v).reshape(-1)) for v in metric.variables]
            metric.merge_states(
                [
                    [g[r].reshape(v.shape) for g, v in zip(gathered, metric.variables, strict=True)]
                    for r in range(comm.world_size)
                ]
            )


def _mean_logs(logs: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    names = sorted(logs)
    values = np.array([float(np.asarray(logs[name])) for name in names])
    comm.allreduce(values)
    return dict(zip(names, (values / comm.world_size).tolist(), strict=True))
