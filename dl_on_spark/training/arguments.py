"""What `Trainer` and `fit` are given, checked before the table is read or anything is written."""

from __future__ import annotations

import numbers
from typing import Any

from dl_on_spark.errors import ConfigError
from dl_on_spark.lake import Schema, Table

_OPTIONAL = {"cpus_per_worker", "checkpoint_every", "steps_per_execution"}


def check_objects(
    model: object, table: object, schema: object, validation: object, callbacks: object, resume: object
) -> None:
    """Raise `ConfigError` for what is not of its kind."""
    if not isinstance(table, Table):
        raise ConfigError(f"fit needs a table, not {type(table).__name__}.", fix="Use open_table(path).")
    if not isinstance(schema, Schema):
        raise ConfigError(f"fit needs a schema, not {type(schema).__name__}.", fix="Use Schema.load(path).")
    if not schema.features:
        raise ConfigError(f"{schema.source} has no feature.", fix="Give at least one field `role: feature`.")
    if not isinstance(model, str) and not callable(model):
        raise ConfigError(f"model={model!r}.", fix='Give "module:function", or a function.')
    share = isinstance(validation, int | float) and 0 < validation < 1
    if validation is not None and not isinstance(validation, Table) and not share:
        raise ConfigError(f"validation={validation!r}.", fix="Give a table, or a share between 0 and 1.")
    if callbacks is not None and not callable(callbacks):
        raise ConfigError("callbacks is no function.", fix="Give one that takes the rank: lambda rank: [...].")
    if resume not in {"auto", "never", "must"}:
        raise ConfigError(f"resume={resume!r}.", fix="Use auto, never or must.")


def check_numbers(deadline_s: object, **given: tuple[Any, int]) -> None:
    """Raise `ConfigError` unless each value is a whole number and at least its bound; some may be None."""
    for name, (value, least) in given.items():
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise ConfigError(f"{name}={value!r}.", fix=f"Give a whole number from {least} on.")
    if not isinstance(deadline_s, int | float) or not deadline_s > 0:
        raise ConfigError(f"deadline_s={deadline_s!r}.", fix="Give a number of seconds above 0.")
