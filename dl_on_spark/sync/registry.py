"""Strategies by name: ``allreduce``, ``local_sgd:every=16,outer=nesterov(0.7,0.9)``, ``gossip:topology=ring``.

A new strategy is one module and one line here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from dl_on_spark.errors import ConfigError
from dl_on_spark.sync.allreduce import Allreduce
from dl_on_spark.sync.base import SyncStrategy
from dl_on_spark.sync.elastic_averaging import ElasticAveraging
from dl_on_spark.sync.gossip import Gossip
from dl_on_spark.sync.local_sgd import LocalSGD, Momentum, Nesterov
from dl_on_spark.sync.parameter_server import ParameterServer
from dl_on_spark.sync.schedule import SCHEDULES
from dl_on_spark.sync.stage_averaging import StageAveraging

STRATEGIES: dict[str, type[Any]] = {
    "allreduce": Allreduce,
    "local_sgd": LocalSGD,
    "elastic_averaging": ElasticAveraging,
    "gossip": Gossip,
    "parameter_server": ParameterServer,
    "stage_averaging": StageAveraging,
}
OUTER: dict[str, type[Any]] = {"momentum": Momentum, "nesterov": Nesterov}

_OPTION = re.compile(r"\s*(\w+)\s*=\s*([^,()]+(?:\([^()]*\))?)\s*(?:,|$)")
_CALL = re.compile(r"(\w+)(?:\(([^()]*)\))?")


def parse_sync(text: str | SyncStrategy) -> SyncStrategy:
    """The strategy that `text` names. Raises `ConfigError` naming what is unknown and the nearest known."""
    if isinstance(text, SyncStrategy):
        return text
    name, _, rest = str(text).strip().partition(":")
    kind = _known(name, STRATEGIES, f"sync {text!r}: strategy")
    options: dict[str, Any] = {}
    at = 0
    while at < len(rest):
        match = _OPTION.match(rest, at)
        if match is None:
            raise ConfigError(f"sync {text!r}: {rest[at:]!r} is not option=value.", fix="local_sgd:every=16")
        options[match[1]] = _value(match[1], match[2].strip(), str(text))
        at = match.end()
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for option in options:
        _known(option, fields, f"sync {text!r}: option")
    try:
        strategy: SyncStrategy = kind(**options)
    except TypeError as error:
        raise ConfigError(f"sync {text!r}: {error}.", fix="Give numbers where numbers are meant.") from error
    return strategy


def _value(option: str, text: str, whole: str) -> Any:
    if option in {"outer", "compress"} and text in {"none", "null"}:
        return None
    if option in {"compress", "topology"}:
        return text
    if option == "staleness" and text in {"inf", "none", "unbounded"}:
        return None
    if option in {"scale_by_staleness", "noise_scale"} and text.lower() in {"true", "false"}:
        return text.lower() == "true"
    match = _CALL.fullmatch(text)
    if option == "every" and match and match[2] is not None:
        schedule = _known(match[1], SCHEDULES, f"sync {whole!r}: schedule")
        try:
            return schedule.parse(match[2])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"sync {whole!r}: every={text}: {error}.", fix="For example stepped(0:4,1000:16) or quadratic(4,0.02)."
            ) from error
    if option != "outer":
        try:
            return int(text) if text.lstrip("+-").isdigit() else float(text)
        except ValueError as error:
            raise ConfigError(
                f"sync {whole!r}: {option}={text} is not a number.", fix=f"For example {option}=16."
            ) from error
    kind = _known(match[1] if match else text, OUTER, f"sync {whole!r}: outer optimizer")
    try:
        return kind(*(float(number) for number in ((match and match[2]) or "").split(",") if number.strip()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sync {whole!r}: outer={text}: {error}.", fix="For example nesterov(0.7,0.9).") from error


def _known(name: str, known: dict[str, Any], what: str) -> Any:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"{what} {name!r} is unknown.",
            fix=f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}.",
        )
    return known[name]
