"""Candidate and current model on the same rows: the difference with its interval, overall and in each slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dl_on_spark.config import GateConfig
from dl_on_spark.registry.bootstrap import Interval, metric_of, paired_difference

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SliceResult:
    """The gate's metric on the rows of one value of one column; the current model's where there is one.

    ``difference``: candidate less current; its interval is the wider, the more slices there are (Bonferroni), since
    of many slices one looks worse by chance.
    """

    column: str
    value: str
    rows: int
    candidate: float
    current: float | None = None
    difference: Interval | None = None

    @property
    def name(self) -> str:
        """For people: column=value."""
        return f"{self.column}={self.value}"


@dataclass(frozen=True)
class Comparison:
    """``current``: digest of the model compared with, None before the first publication; ``version``: its number.

    ``before``: the current model's metric on all held-out rows. ``difference`` is measured on ``rows`` of them: all,
    or a seeded share of them where they are many.
    """

    metric: str
    confidence: float
    rows: int
    slice_columns: tuple[str, ...] = ()
    min_slice_rows: int = 0
    slices: tuple[SliceResult, ...] = ()
    current: str | None = None
    version: int | None = None
    before: float | None = None
    difference: Interval | None = None

    def answers(self, gate: GateConfig, current: str | None) -> bool:
        """Whether it is what `gate` asks for against the model `current`."""
        asked = (gate.metric, gate.confidence, gate.slices, gate.min_slice_rows, current)
        return asked == (self.metric, self.confidence, self.slice_columns, self.min_slice_rows, self.current)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """What `dataclasses.asdict` made of it, through JSON."""
        slices = [SliceResult(**{**one, "difference": _interval(one["difference"])}) for one in data["slices"]]
        columns = tuple(data["slice_columns"])
        difference = _interval(data["difference"])
        return cls(**{**data, "slices": tuple(slices), "slice_columns": columns, "difference": difference})


def compare(rows: pa.Table, candidate: Array, current: Array | None, label: str, gate: GateConfig) -> Comparison:
    """Compare scores of shape (rows,) on `rows`, which hold the label and the slices' columns."""
    truth = np.asarray(rows.column(label).cast(pa.float64()), dtype=np.float64)
    difference = None
    if current is not None:
        difference = paired_difference(gate.metric, truth, candidate, current, gate.confidence)
    parts = [
        (column, value, inside)
        for column in gate.slices
        for value, inside in _slices(rows.column(column), gate.min_slice_rows)
    ]
    confidence = 1 - (1 - gate.confidence) / max(len(parts), 1)
    found = []
    for column, value, inside in parts:
        new = metric_of(gate.metric, truth[inside], candidate[inside])
        if new is None:
            continue  # one class alone
        one = SliceResult(column, value, int(inside.size), new)
        if current is not None:
            old = metric_of(gate.metric, truth[inside], current[inside])
            gain = paired_difference(gate.metric, truth[inside], candidate[inside], current[inside], confidence)
            one = SliceResult(column, value, int(inside.size), new, old, gain)
        found.append(one)
    return Comparison(
        gate.metric,
        gate.confidence,
        rows.num_rows,
        gate.slices,
        gate.min_slice_rows,
        tuple(found),
        difference=difference,
    )


def _slices(column: pa.ChunkedArray, least: int) -> Iterator[tuple[str, Array]]:
    """Each value of at least `least` rows as text, with the places of its rows; nulls are a slice too."""
    codes = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
    values = codes.dictionary.to_pylist()
    places = np.asarray(codes.indices)
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places, minlength=len(values)))
    named = sorted((("null" if value is None else str(value)), i) for i, value in enumerate(values))
    for name, i in named:
        inside = order[ends[i - 1] if i else 0 : ends[i]]
        if inside.size >= least:
            yield name, inside


def _interval(data: Mapping[str, float] | None) -> Interval | None:
    return None if data is None else Interval(**data)


def is_sliceable(kind: pa.DataType) -> bool:
    """Whether a column's values can name slices: text, numbers, dates, truth values."""
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind))
