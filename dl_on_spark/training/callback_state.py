"""What the user's callbacks have learnt, for checkpoints: patience used up, best value so far, best weights.

Keras's callbacks keep it as plain attributes, set anew in `on_train_begin`. So the last callback of the list
(`CallbackState`) notes them when training begins, saves those that have changed since, and puts back what a
checkpoint holds. What did not change is configuration: a resumed run takes that from its own code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from dl_on_spark.training.state import Arrays

_log = logging.getLogger(__name__)
_PLAIN = "plain"
_KERAS_OWN = {"model", "_model", "params"}


class CallbackState(keras.callbacks.Callback):
    """Comes last in the list of ``callbacks``, whose changing attributes it saves and restores.

    Kept are numbers, text, booleans, None, flat lists and dicts of these, and lists of arrays.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], saved: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._callbacks, self._saved = list(callbacks), dict(saved or {})
        self._before: list[dict[str, str]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._before = [{name: _text(value) for name, value in _kept(one).items()} for one in self._callbacks]
        if self._saved:
            self._restore()

    def state(self) -> Arrays:
        """What has changed since training began, as arrays by name; empty before that, and where nothing has."""
        plain: list[dict[str, Any]] = []
        arrays: Arrays = {}
        for at, (callback, before) in enumerate(zip(self._callbacks, self._before, strict=False)):
            changed = {name: value for name, value in _kept(callback).items() if before.get(name) != _text(value)}
            lists = {name: value for name, value in changed.items() if _is_arrays(value)}
            for name, values in lists.items():
                arrays.update({f"{at}/{name}/{i}": np.asarray(value) for i, value in enumerate(values)})
            values = {name: _plain(value) for name, value in changed.items() if name not in lists}
            plain.append(
                {"class": type(callback).__name__, "values": values, "arrays": {n: len(lists[n]) for n in lists}}
            )
        if not any(one["values"] or one["arrays"] for one in plain):
            return {}
        return {**arrays, _PLAIN: np.frombuffer(json.dumps(plain).encode(), np.uint8).copy()}

    def _restore(self) -> None:
        plain = json.loads(np.asarray(self._saved[_PLAIN]).tobytes())
        if [one["class"] for one in plain] != [type(one).__name__ for one in self._callbacks]:
            _log.warning(
                "The checkpoint's callbacks are %s, this run's are %s: they begin anew.",
                [one["class"] for one in plain],
                [type(one).__name__ for one in self._callbacks],
            )
            return
        for at, (callback, saved) in enumerate(zip(self._callbacks, plain, strict=True)):
            for name, value in saved["values"].items():
                setattr(callback, name, value)
            for name, count in saved["arrays"].items():
                setattr(callback, name, [np.asarray(self._saved[f"{at}/{name}/{i}"]) for i in range(count)])


def _kept(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in _KERAS_OWN and (_is_plain(value) or _is_arrays(value))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_scalar(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_scalar(item) for name, item in value.items())
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, np.number))


def _is_arrays(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, np.ndarray) for item in value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.item() if isinstance(value, np.number) else value


def _text(value: Any) -> str:
    """Equal for equal values; arrays by their bytes."""
    if _is_arrays(value):
        return " ".join(f"{item.shape} {hash(item.tobytes())}" for item in value)
    return json.dumps(_plain(value))
