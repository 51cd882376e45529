"""The `preprocess` entry of a schema's field: which steps there are, and which options make sense."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

Preprocess = str | dict[str, dict[str, Any]]

# Each step: its options, and those that must be given.
_STEPS: dict[str, tuple[set[str], set[str]]] = {
    "standardize": (set(), set()),
    "vocabulary": ({"max", "oov"}, {"max"}),
    "hash": ({"buckets"}, {"buckets"}),
    "bucketize": ({"boundaries", "quantiles"}, set()),
}


def checked(value: Preprocess | None) -> Preprocess | None:
    """The entry in its one form: "standardize", or {step: options}. Raises `ValueError` saying what is wrong."""
    if value is None:
        return None
    step, options = (value, {}) if isinstance(value, str) else _only_entry(value)
    if step not in _STEPS:
        raise ValueError(f"unknown preprocess {step!r}; known: {', '.join(_STEPS)}")
    known, needed = _STEPS[step]
    for name in options:
        if name not in known:
            raise ValueError(f"preprocess {step} has no option {name!r}; known: {', '.join(sorted(known))}")
    if needed - set(options):
        raise ValueError(f"preprocess {step} needs the option {sorted(needed - set(options))[0]!r}")
    if step == "bucketize" and len(options) != 1:
        raise ValueError("preprocess bucketize needs either boundaries or quantiles")
    for name, given in options.items():
        fits, words = _VALUES[name]
        if not fits(given):
            raise ValueError(f"preprocess {step}: {name} must be {words}, not {given!r}")
    return step if step == "standardize" else {step: options}


def _only_entry(value: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    if len(value) != 1:
        raise ValueError("preprocess is one step with its options")
    ((step, options),) = value.items()
    return step, options or {}


def _whole(least: int) -> Callable[[Any], bool]:
    # Indices are int32, and a vocabulary's are the sum of two of these numbers.
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**30


def _increasing(value: Any) -> bool:
    numbers = isinstance(value, (list, tuple)) and all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in value
    )
    return numbers and len(value) > 0 and all(a < b for a, b in pairwise(value))


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max": (_whole(1), "a whole number from 1 on"),
    # Without a place of its own, an unknown value would be taken for the first word.
    "oov": (_whole(1), "a whole number from 1 on"),
    "buckets": (_whole(1), "a whole number from 1 on"),
    "quantiles": (_whole(2), "a whole number from 2 on"),
    "boundaries": (_increasing, "a list of increasing numbers"),
}
