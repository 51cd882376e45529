"""Training simulated step by step: workers whose steps vary, wait for each other, and fail.

A worker begins its next step when those it waits for have done theirs, so finishing times follow a recurrence of
maxima and sums. The closed forms of `stragglers` are its limits: what they leave out (waiting that one step hands on
to the next, failures while work is done again) is in here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """``seconds``: until the slowest worker is done. ``waiting_s``: mean over workers. ``failures``: that happened."""

    seconds: float
    waiting_s: float
    failures: int


def simulate(
    *,
    workers: int,
    steps: int,
    step_s: float,
    spread: float = 0.0,
    exchange_s: float = 0.0,
    every: int = 1,
    neighbours: int | None = None,
    staleness: int | None = None,
    seed: int = 0,
) -> Simulated:
    """Run so many steps. Steps take normal times of mean ``step_s`` and standard deviation ``spread step_s``.

    An exchange of ``exchange_s`` comes each ``every`` steps: with all workers, with the next ``neighbours`` on either
    side of a ring (gossip), or without waiting but never more than ``staleness`` exchanges ahead of the slowest
    (stale-synchronous parallel; Ho et al., 2013).
    """
    random = np.random.default_rng(seed)
    now: Times = np.zeros(workers)
    worked: Times = np.zeros(workers)
    rounds: list[Times] = [now]
    done = 0
    while done < steps:
        count = min(every, steps - done)
        done += count
        work = np.maximum(0.0, random.normal(step_s, spread * step_s, (count, workers))).sum(0)
        worked += work + exchange_s
        start = now
        if staleness is not None and len(rounds) > staleness:
            start = np.maximum(now, rounds[-1 - staleness].max())
        end = start + work
        if staleness is None:
            end = _together(end, neighbours)
        now = end + exchange_s
        rounds.append(now)
        del rounds[: -1 - (staleness or 0)]
    return Simulated(float(now.max()), float((now.max() - worked).mean()), 0)


def simulate_failures(
    *, seconds: float, workers: int, failures_per_hour: float, interval_s: float, restart_s: float, seed: int = 0
) -> Simulated:
    """A run of ``seconds`` that saves every ``interval_s``; each failure costs a restart and what was not saved."""
    random = np.random.default_rng(seed)
    rate = workers * failures_per_hour / 3600
    clock = saved = progress = 0.0
    failures = 0
    next_failure = random.exponential(1 / rate) if rate else np.inf
    while progress < seconds:
        until = min(seconds, saved + interval_s)
        end = clock + until - progress
        if next_failure < end:
            failures += 1
            clock, progress = next_failure + restart_s, saved
            next_failure = clock + random.exponential(1 / rate)
        else:
            clock, progress, saved = end, until, until
    return Simulated(clock, clock - seconds, failures)


def _together(end: Times, neighbours: int | None) -> Times:
    """When those that a worker waits for are done too."""
    if neighbours is None:
        return np.full_like(end, end.max())
    reach = min(neighbours, len(end) // 2)
    around: Times = np.stack([np.roll(end, by) for by in range(-reach, reach + 1)])
    latest: Times = around.max(axis=0)
    return latest
