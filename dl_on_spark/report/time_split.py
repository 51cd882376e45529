"""Where a run's time went, in words: shares of a step, the slowest worker, and the change that would help most."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from dl_on_spark.training.stragglers import slowest

PARTS = ("input", "compute", "exchange", "waiting")
_MUCH = 0.2  # share of a step that is worth a change
_ADVICE = {
    "input": "Rows come too late: give workers more cores (cpus_per_worker) or rewrite the table in larger row groups.",
    "exchange": "The exchange takes much: exchange seldom (local_sgd:every=16) or take a larger global batch.",
    "waiting": "Workers wait for the slowest: look at its host, or exchange seldom (local_sgd:every=16).",
}

Seconds = Sequence[Mapping[str, float]]


def step_parts(seconds_by_rank: Seconds) -> dict[str, float]:
    """Seconds of a step by part, mean over the workers; empty where no step was timed."""
    timed = [one for one in seconds_by_rank if one.get("steps")]
    return {part: statistics.fmean(one[part] / one["steps"] for one in timed) for part in PARTS} if timed else {}


def described(seconds_by_rank: Seconds) -> str:
    """The split in one line, the slowest worker named where it costs much, and what would help most."""
    parts = step_parts(seconds_by_rank)
    total = sum(parts.values())
    if not total:
        return "no step was timed"
    text = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
    sentences = [f"{text} of {total * 1e3:.3g} ms a step."]
    late = slowest(seconds_by_rank)
    if late is not None:
        sentences.append(f"Rank {late[0]} takes {late[1]:.2f} times as long as the others.")
    costly = max(_ADVICE, key=lambda part: parts[part])
    if parts[costly] / total >= _MUCH:
        sentences.append(_ADVICE[costly])
    return " ".join(sentences)
