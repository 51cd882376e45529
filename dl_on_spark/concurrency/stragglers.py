"""Who waits for whom: the expected wait of workers whose steps vary, and of runs that fail."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=1024)
def expected_maximum(workers: int) -> float:
    """Mean of the largest of P independent standard normal numbers; 0 for one, about ``sqrt(2 ln P)`` for many.

    ``E = integral of z P phi(z) Phi(z)^(P - 1)``, by the trapezoid rule.
    """
    if workers <= 1:
        return 0.0
    z = np.linspace(-9.0, 9.0, 8001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in z]))
    return float(np.trapezoid(z * workers * density * below ** (workers - 1), z))


def wait(step_s: float, spread: float, workers: int, every: int = 1) -> float:
    """Seconds a step that a barrier each ``every`` steps costs: ``sigma sqrt(H) E[max of P] / H``.

    Steps are taken as independent; their sum over H steps has the standard deviation ``sigma sqrt(H)``.
    """
    return step_s * spread * expected_maximum(workers) / math.sqrt(every)


def with_failures(seconds: float, workers: int, failures_per_hour: float, interval_s: float, restart_s: float) -> float:
    """Expected seconds of a run of ``seconds`` that resumes from its last checkpoint after each failure.

    Each failure costs a restart and half an interval between checkpoints, and happens while work is done again
    too: ``T / (1 - rate (restart + interval / 2))`` (Young, 1974, to first order). Infinite where failures come
    faster than work is done.
    """
    lost = workers * failures_per_hour / 3600 * (restart_s + min(interval_s, seconds) / 2)
    return seconds / (1 - lost) if lost < 1 else math.inf
