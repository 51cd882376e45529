"""Intervals of a difference, slices and drift: equal to their definitions."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.config import GateConfig
from dl_on_spark.registry.bootstrap import _draws, _weighted, metric_of, paired_difference
from dl_on_spark.registry.comparison import compare
from dl_on_spark.registry.drift import Profile, drift, profile_of
from dl_on_spark.registry.metrics import metrics_of

METRICS = ("auc", "accuracy", "log_loss", "mean_squared_error", "mean_absolute_error")


def _scored(rows: int, noise: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, and scores of a good model and of one that adds noise to it."""
    generator = np.random.default_rng(seed)
    chance = generator.random(rows)
    truth = (generator.random(rows) < chance).astype(np.float64)
    return truth, chance, np.clip(chance + generator.normal(0, noise, rows), 0, 1)


@pytest.mark.parametrize("metric", METRICS)
def test_the_metric_without_draws_is_that_of_the_evaluation(metric: str) -> None:
    truth, good, noisy = _scored(500, 0.2)
    noisy = noisy.round(1)  # ties
    exact, other = metrics_of(truth, good, 0.5), metrics_of(truth, noisy, 0.5)
    assert metric_of(metric, truth, noisy) == pytest.approx(getattr(other, metric))
    found = paired_difference(metric, truth, noisy, good)
    assert found is not None and found.low <= found.value <= found.high
    assert found.value == pytest.approx(getattr(other, metric) - getattr(exact, metric))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(0, 5))
def test_a_round_equals_the_auc_of_the_rows_drawn(rows: int, seed: int) -> None:
    truth, _, noisy = _scored(rows, 0.3, seed)
    noisy = noisy.round(1)
    counts = next(_draws(rows, 3))
    assert counts.sum(axis=1).tolist() == [rows] * 3

    for metric in ("auc", "log_loss"):
        found = _weighted(metric, truth, noisy)(counts)
        for one, value in zip(counts.astype(int), found, strict=True):
            expected = metrics_of(np.repeat(truth, one), np.repeat(noisy, one), 0.5)
            exact = getattr(expected, metric)
            assert np.isnan(value) if exact is None else value == pytest.approx(exact)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 100 samples of a known difference in accuracy some 90 intervals of 90 % hold it (binomial bounds)."""
    covered = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        truth = np.ones(400)
        new, old = (generator.random(400) < 0.8) * 1.0, (generator.random(400) < 0.7) * 1.0
        found = paired_difference("accuracy", truth, new, old, confidence=0.9, rounds=300)
        assert found is not None
        covered += found.low <= 0.1 <= found.high
    assert 80 <= covered <= 98


def test_the_same_rows_give_the_same_interval_and_one_class_none() -> None:
    truth, good, noisy = _scored(3_000, 0.1)
    first = paired_difference("auc", truth, noisy, good)
    assert first == paired_difference("auc", truth, noisy, good)
    assert first is not None and first.high < 0  # noise costs, and 3,000 rows show it
    assert paired_difference("auc", np.ones(5), good[:5], noisy[:5]) is None


def test_each_value_of_enough_rows_is_a_slice_and_the_one_that_got_worse_is_told() -> None:
    truth, good, noisy = _scored(4_000, 0.6)
    place = pa.array((["a"] * 1_500 + [None] * 1_000 + ["b"] * 1_450 + ["few"] * 50), pa.string())
    rows = pa.table({"y": truth, "place": place, "hour": pa.array([i % 2 for i in range(4_000)])})
    candidate = np.where(np.arange(4_000) < 1_500, noisy, good)
    gate = GateConfig(slices=("place", "hour"), min_slice_rows=100)
    found = compare(rows, candidate, good, "y", gate)
    names = [(one.name, one.rows) for one in found.slices]
    assert names == [("place=a", 1500), ("place=b", 1450), ("place=null", 1000), ("hour=0", 2000), ("hour=1", 2000)]
    a, b, *_ = found.slices
    assert a.difference is not None and a.difference.high < -0.02
    assert b.difference is not None and (b.difference.low, b.difference.high) == (0, 0)
    assert a.candidate == pytest.approx(metrics_of(truth[:1_500], noisy[:1_500], 0.5).auc)
    alone = compare(rows, candidate, None, "y", gate)
    assert [one.difference for one in alone.slices] == [None] * 5 and alone.difference is None


def test_drift_is_zero_on_the_training_rows_and_large_where_a_feature_went_elsewhere() -> None:
    generator = np.random.default_rng(3)
    x, hour = generator.normal(size=5_000), generator.integers(0, 24, 5_000)
    words = np.array(["a", "b", "c"])[generator.integers(0, 3, 5_000)]
    day = generator.integers(0, 100, 5_000).astype("datetime64[D]")
    train = pa.table({"x": x, "hour": hour, "word": words, "day": day, "list": [[1.0]] * 5_000})
    profile = Profile.from_json(profile_of(train, train.column_names, "rows").to_json())
    assert set(profile.features) == {"x", "hour", "word", "day"}
    assert all(index == pytest.approx(0, abs=1e-12) for index in drift(profile, train).values())
    assert all(sum(one.shares) == pytest.approx(1) for one in profile.features.values())
    half = pa.table({"x": x[:2_000], "hour": hour[2_000:4_000], "word": words[:2_000]})
    assert max(drift(profile, half).values()) < 0.02
    nulls = pa.array([None] * 1_000 + x[:1_000].tolist())
    moved = pa.table({"x": x + 2, "hour": hour})
    assert drift(profile, moved)["x"] > 0.25 > drift(profile, moved)["hour"]
    assert drift(profile, pa.table({"x": nulls}))["x"] > 0.25
    assert drift(profile, pa.table({"word": ["new"] * 10}))["word"] > 0.25
