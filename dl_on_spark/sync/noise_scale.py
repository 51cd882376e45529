"""The simple gradient noise scale: how many rows a step are worth it (McCandlish et al. 2018, appendix A.1).

``B_noise = tr(Σ) / |G|²``, with the true gradient G and the covariance Σ of one row's gradient. Both follow
without bias from the lengths of a rank's gradient and of the reduced one, which an allreduce has at hand. With
``h_k = s_k g_k``, what rank k adds to the reduced gradient ``h = Σ h_k`` (s_k is its share of the rows, n all rows):

    E Σ|h_k|² = a |G|² + v tr(Σ)        a = Σ s_k²
    E  |h|²   =   |G|² + v tr(Σ)        v = Σ s_k² / n_k = 1 / n

so ``|G|² = (|h|² − Σ|h_k|²) / (1 − a)`` and ``tr(Σ) = (|h|² − |G|²) / v``. Where a rank adds up the gradients of m
batches first, s_k is its mean share and ``v = Σ_t 1 / (m² n_t)``. With equal ranks these are the paper's. Each is
averaged over an epoch's steps before they are divided: a mean of ratios would be biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.input_pipeline import SamplePlan

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

Flat = npt.NDArray[Any]


class NoiseMeter:
    """Sums of both estimates over an epoch; the same on all ranks after `agree`."""

    def __init__(self, plan: SamplePlan, comm: Communicator) -> None:
        self._plan, self._comm = plan, comm
        self._own = np.zeros(2)  # of |G|² and tr(Σ), this rank's part since the ranks last agreed
        self.sums = np.zeros(2)

    def add(self, own_square: float, square: float, steps: Sequence[int]) -> None:
        """One exchange of a bucket: |h_k|² and |h|² of its entries, and the plan's steps that went into it."""
        if not np.isfinite(square):
            return  # a loss scaler skips this step, on all ranks
        overlap, spread = coefficients(self._plan, steps, self._comm.world_size)
        part = square / self._comm.world_size
        gradient = (part - own_square) / (1 - overlap)
        self._own += gradient, (part - gradient) / spread

    def agree(self) -> None:
        """One allreduce of two numbers."""
        self.sums = self.sums + self._comm.allreduce(self._own)
        self._own = np.zeros(2)

    def begin_epoch(self) -> None:
        """Forget the epoch before."""
        self._own, self.sums = np.zeros(2), np.zeros(2)

    def metrics(self) -> dict[str, float]:
        """``noise_scale`` in rows, at most the rows of an epoch: of more, they tell nothing."""
        gradient, noise = self.sums
        if not noise > 0:
            return {}
        return {"noise_scale": float(noise / max(gradient, noise / self._plan.rows))}


def coefficients(plan: SamplePlan, steps: Sequence[int], world_size: int) -> tuple[float, float]:
    """``(a, v)`` of the formulas above, for the sum of the gradients of ``steps`` over their number."""
    at = [step % plan.steps_per_epoch for step in steps]
    shares = sum(plan.shares(step, world_size) for step in at) / len(at)
    return float(np.square(shares).sum()), sum(1 / plan.step_rows(step) for step in at) / len(at) ** 2


def batch_advice(noise_scale: float, batch: int) -> str:
    """What a noise scale says of a batch, both in rows: steps and rows needed are as ``1 + B_noise/B`` and
    ``1 + B/B_noise`` times the fewest (McCandlish et al. 2018, equation 2.11)."""
    steps, rows = 1 + noise_scale / batch, 1 + batch / noise_scale
    needs = f"{batch:,} rows an update need {steps:.3g} times the fewest updates and {rows:.3g} times the fewest rows"
    if batch > 2 * noise_scale:
        return f"{needs}: fewer rows an update ({noise_scale:,.0f}) would spare rows and cost few updates more."
    if 2 * batch < noise_scale:
        return f"{needs}: more rows an update (up to {noise_scale:,.0f}) would spare updates and cost few rows more."
    return f"{needs}: near the noise scale of {noise_scale:,.0f}, which is a good batch."
