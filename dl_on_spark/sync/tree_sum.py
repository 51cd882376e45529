"""Sums of named arrays, some at a time: what a tree of tasks needs to average replicas and to add up metrics.

A name's first part says how its arrays go together:

- ``trained/``, ``mean/``: the replica's values times its share of the rows, to be added; the average of weights that
  the optimizer trains, or that follow the data;
- ``sum/``: to be added, metrics;
- ``stack/``: one after the other along the first axis, for metrics that merge themselves;
- ``first/``: only one replica has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.sync.local_sgd import Momentum, Nesterov

Arrays = dict[str, npt.NDArray[Any]]
FAN_IN = 8


def combine(parts: Iterable[Mapping[str, npt.NDArray[Any]]]) -> Arrays:
    """The parts put together, in their order; one part is in memory at a time beside the total."""
    total: Arrays = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value.copy()
            elif name.startswith("stack/"):
                total[name] = np.concatenate([total[name], value])
            else:
                total[name] += value
    return total


def after_round(
    total: Mapping[str, npt.NDArray[Any]],
    before: Mapping[str, npt.NDArray[Any]],
    outer: Momentum | Nesterov | None,
) -> Arrays:
    """What all replicas go on from, given the sum over all of them and what they went on from ``before``.

    Weights keep their dtype; metrics go by ``metric/`` and ``stack/``, the outer optimizer's velocity by ``velocity/``.
    """
    found = {name: value for name, value in before.items() if not name.startswith(("metric/", "stack/"))}
    for name, value in total.items():
        kind, _, rest = name.partition("/")
        if kind == "sum":
            found[f"metric/{rest}"] = value
        elif kind == "stack":
            found[name] = value
        elif kind == "trained" and outer is not None:
            start = before[rest].astype(value.dtype)
            velocity = before.get(f"velocity/{rest}", np.zeros_like(value)).astype(value.dtype)
            found[rest] = (start - outer.apply(start - value, velocity)).astype(before[rest].dtype)
            found[f"velocity/{rest}"] = velocity
        else:
            found[rest] = value.astype(before[rest].dtype)
    return found
