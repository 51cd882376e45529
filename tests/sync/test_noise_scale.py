"""The gradient noise scale on gradients whose noise is known, and in training on two real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dl_on_spark.errors import ConfigError
from dl_on_spark.input_pipeline import SamplePlan
from dl_on_spark.sync import Allreduce
from dl_on_spark.sync.noise_scale import NoiseMeter, batch_advice, coefficients
from tests.collectives.processes import Ranks
from tests.sync import noise_ranks
from tests.training.worlds import PLAN

DIMENSIONS, GRADIENT, NOISE = 40, 2.0, 30.0  # |G|^2 and tr(Sigma)
EXACT = NOISE / GRADIENT


class _Together:
    """Ranks of one process: `agree` sums what they have handed in."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.own = world_size, []

    def allreduce(self, array: np.ndarray) -> np.ndarray:
        return np.sum(self.own, 0)


@pytest.mark.parametrize(("world_size", "batches"), [(2, 1), (3, 1), (4, 2), (2, 4)])
def test_both_estimates_are_unbiased_also_for_unequal_ranks(world_size: int, batches: int) -> None:
    """Batches of 10 rows, the last of 6."""
    rng = np.random.default_rng(5)
    plan = SamplePlan.create([46], num_workers=world_size, global_batch_size=10, seed=None, canonical_shards=world_size)
    assert plan.steps_per_epoch == 5
    true = rng.normal(size=DIMENSIONS)
    true *= np.sqrt(GRADIENT) / np.linalg.norm(true)
    together = _Together(world_size)
    meters = [NoiseMeter(plan, together) for _ in range(world_size)]
    trials = 6000
    estimates = np.zeros((trials, 2))
    for trial in range(trials):
        steps = [(trial + t) % plan.steps_per_epoch for t in range(batches)]
        parts = []
        for rank in range(world_size):
            part = np.zeros(DIMENSIONS)
            for step in steps:
                rows = plan.rank_rows(step, rank, world_size)
                noise = rng.normal(size=DIMENSIONS) * np.sqrt(NOISE / DIMENSIONS / rows)
                part += rows / plan.step_rows(step) / batches * (true + noise)
            parts.append(part)
        total = np.sum(parts, 0)
        for meter, part in zip(meters, parts, strict=True):
            meter.begin_epoch()
            meter.add(float(part @ part), float(total @ total), steps)
        together.own = [meter._own for meter in meters]
        meters[0].agree()
        estimates[trial] = meters[0].sums
    mean, error = estimates.mean(0), estimates.std(0) / np.sqrt(trials)
    np.testing.assert_array_less(np.abs(mean - [GRADIENT, NOISE]), 4 * error)
    assert (error / mean < 0.02).all()  # so the test would see a bias of a tenth
    assert mean[1] / mean[0] == pytest.approx(EXACT, rel=0.08)


def test_with_equal_ranks_the_estimates_are_those_of_the_paper() -> None:
    """McCandlish et al. 2018, equations A.2 and A.3, for b rows on each of K ranks."""
    plan = SamplePlan.create([80], num_workers=4, global_batch_size=40, seed=None)
    rng = np.random.default_rng(1)
    local = rng.normal(size=(4, 6))
    big, small, mean = 40, 10, local.mean(0)
    square, small_square = float(mean @ mean), float(np.square(local).sum(1).mean())
    together = _Together(4)
    meters = [NoiseMeter(plan, together) for _ in range(4)]
    for meter, own in zip(meters, local, strict=True):
        meter.add(float(own @ own) / 16, square, [0])
    together.own = [meter._own for meter in meters]
    meters[0].agree()
    expected = (
        (big * square - small * small_square) / (big - small),
        (small_square - square) / (1 / small - 1 / big),
    )
    np.testing.assert_allclose(meters[0].sums, expected, rtol=1e-12)


def test_coefficients_of_one_batch_are_those_of_its_shares() -> None:
    overlap, spread = coefficients(PLAN, [PLAN.steps_per_epoch - 1], 2)  # 11 rows: 7 and 4
    np.testing.assert_allclose([overlap, spread], [(49 + 16) / 121, 1 / 11])


def test_a_gradient_lost_in_noise_gives_no_more_than_the_rows_of_an_epoch() -> None:
    meter = NoiseMeter(PLAN, _Together(2))  # type: ignore[arg-type]
    assert meter.metrics() == {}
    meter.sums = np.array([-0.5, 10.0])
    assert meter.metrics() == {"noise_scale": PLAN.rows}


def test_the_advice_names_both_prices() -> None:
    assert "2 times the fewest updates and 2 times the fewest rows: near" in batch_advice(1000.0, 1000)
    assert "fewer rows an update (100)" in batch_advice(100.0, 1000)
    assert "1.1 times the fewest rows: more rows" in batch_advice(10_000.0, 1000)


def test_it_takes_two_workers_and_whole_gradients() -> None:
    Allreduce(noise_scale=True).check(2)
    with pytest.raises(ConfigError, match="there is one"):
        Allreduce(noise_scale=True).check(1)
    with pytest.raises(ConfigError, match="compress=fp16"):
        Allreduce(noise_scale=True, compress="fp16")
    with pytest.raises(ConfigError, match="noise_scale=3"):
        Allreduce(noise_scale=3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with Ranks(2, noise_ranks.run, deadline_s=60) as two:
        return two.results()


@pytest.mark.parametrize("name", ["plain", "loss scale", "small buckets", "clipped", "accumulated"])
def test_training_reports_what_its_gradients_say(found: list[dict[str, Any]], name: str) -> None:
    exact = found[0]["exact, accumulated" if name == "accumulated" else "exact"]
    for rank in found:
        sums, reported = rank[name]
        np.testing.assert_allclose(sums, exact, rtol=1e-4)
        np.testing.assert_allclose(reported, exact[1] / max(exact[0], exact[1] / PLAN.rows), rtol=1e-4)


def test_an_epoch_in_two_parts_has_the_noise_scale_of_one_run(found: list[dict[str, Any]]) -> None:
    whole, resumed = found[0]["parts"]
    assert whole == pytest.approx(resumed, rel=1e-6)
    assert whole == found[1]["parts"][0]
