"""Do today's inputs look like those the model was trained on? The population stability index of each feature.

A feature's training rows are cut once into parts: ten of equal weight for numbers, its most frequent values for the
rest, and one for nulls. Their shares are kept with the model, and the same cuts are applied to later rows. The index
is the sum over the parts of (now - then) ln(now / then); by custom, 0.1 is a shift to look at and 0.25 a large one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dl_on_spark.errors import InputError
from dl_on_spark.lake.statistics import as_numbers

Array = npt.NDArray[Any]

_PARTS = 10
_WORDS = 20
_LEAST_SHARE = 1e-4  # of an empty part, whose logarithm would be infinite


@dataclass(frozen=True)
class FeatureProfile:
    """``cuts``: inner boundaries of a number's parts, or None; ``words``: values with a part of their own, as text.

    ``shares``: of the parts in their order, then of all other values, last of nulls.
    """

    cuts: tuple[float, ...] | None
    words: tuple[str, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """What a model's inputs looked like on ``rows`` of its training rows, those of the snapshot ``fingerprint``."""

    fingerprint: str
    rows: int
    features: dict[str, FeatureProfile]

    def to_json(self) -> str:
        """The profile as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """The profile that `to_json` wrote. Raises `InputError` for any other text."""
        try:
            data = json.loads(text)
            features = {
                name: FeatureProfile(
                    None if one["cuts"] is None else tuple(one["cuts"]), tuple(one["words"]), tuple(one["shares"])
                )
                for name, one in data["features"].items()
            }
            return cls(data["fingerprint"], data["rows"], features)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"profile.json is damaged ({error}).", fix="Run the evaluate job again.") from error


def profile_of(rows: pa.Table, features: Iterable[str], fingerprint: str = "") -> Profile:
    """Cuts and shares of the flat columns among `features`; lists, tensors and structs are left out."""
    found = {}
    for name in features:
        column = rows.column(name)
        if _is_flat(column.type):
            cuts, words = _cuts(column)
            found[name] = FeatureProfile(cuts, words, tuple(_shares(column, cuts, words).tolist()))
    return Profile(fingerprint, rows.num_rows, found)


def drift(profile: Profile, rows: pa.Table) -> dict[str, float]:
    """The index of each of the profile's features that `rows` has; 0 is the same distribution."""
    return {
        name: _index(np.asarray(one.shares), _shares(rows.column(name), one.cuts, one.words))
        for name, one in profile.features.items()
        if name in rows.column_names
    }


def _index(then: Array, now: Array) -> float:
    then, now = np.maximum(then, _LEAST_SHARE), np.maximum(now, _LEAST_SHARE)
    return float(((now - then) * np.log(now / then)).sum())


def _is_flat(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _cuts(column: pa.ChunkedArray) -> tuple[tuple[float, ...] | None, tuple[str, ...]]:
    if not _is_measure(column.type):
        return None, tuple(word for word, _ in _ranked(column)[:_WORDS])
    numbers = as_numbers(column.drop_null())
    if not numbers.size:
        return (), ()
    inner = np.quantile(numbers, np.arange(1, _PARTS) / _PARTS, method="lower")
    return tuple(np.unique(inner).tolist()), ()


def _shares(column: pa.ChunkedArray, cuts: tuple[float, ...] | None, words: tuple[str, ...]) -> Array:
    total = max(len(column), 1)
    if cuts is None:
        counted = dict(_ranked(column))
        known = [counted.get(word, 0) for word in words]
        parts = [*known, sum(counted.values()) - sum(known)]
    else:
        # Right of a cut: values equal to it stay below, as the quantile that was taken "lower" does.
        places = np.searchsorted(np.asarray(cuts), as_numbers(column.drop_null()), side="left")
        parts = np.bincount(places, minlength=len(cuts) + 1).tolist()
    return np.array([*parts, total - sum(parts)]) / total


def _ranked(column: pa.ChunkedArray) -> list[tuple[str, int]]:
    """(value as text, how often), most frequent first, ties by value; nulls left out."""
    counts = pc.value_counts(column.drop_null().combine_chunks())
    found = [(str(item["values"]), item["counts"]) for item in counts.to_pylist()]
    return sorted(found, key=lambda item: (-item[1], item[0]))


def _is_measure(kind: pa.DataType) -> bool:
    ordered = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_date, pa.types.is_timestamp)
    return any(is_one(kind) for is_one in ordered)
