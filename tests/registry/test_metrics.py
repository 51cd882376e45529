"""Metrics: equal to their definitions, and the tallies of the parts of a table give those of the whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.registry.metrics import CALIBRATION_BINS, Metrics, area_under_curve, metrics_of
from dl_on_spark.registry.tally import KEYS, SCORE_BINS, SUMS, metrics_of_tally, tally

# Few distinct scores, so that ties are common; the ends and the threshold are among them.
SCORES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1, width=32))
ROWS = st.lists(st.tuples(st.integers(0, 1), SCORES), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_auc_is_the_share_of_pairs_in_order_with_ties_half(rows: list[tuple[int, float]]) -> None:
    truth, scores = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    pairs = [(p > q) + (p == q) / 2 for p, q in itertools.product(scores[truth == 1], scores[truth == 0])]
    found = area_under_curve(truth, scores)
    assert found is None if not pairs else found == pytest.approx(np.mean(pairs))


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 5), st.floats(0.01, 0.99))
def test_tallies_of_parts_give_the_metrics_of_the_whole(rows: list[tuple[int, float]], parts: int, rate: float) -> None:
    truth = np.array([r[0] for r in rows], np.float64)
    scores = np.array([r[1] for r in rows], np.float32)
    tallies = [tally(truth[i::parts], scores[i::parts]) for i in range(parts)]
    together = {name: np.concatenate([t[name] for t in tallies]) for name in (*KEYS, *SUMS)}
    found, exact = metrics_of_tally(together, rate), metrics_of(truth, scores, rate)
    for name in ("base_rate", "mean_squared_error", "mean_absolute_error", "log_loss", "accuracy", "baseline_log_loss"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-9, abs=1e-12), name
    assert [b.rows for b in found.calibration] == [b.rows for b in exact.calibration]
    assert [b.observed_rate for b in found.calibration] == pytest.approx([b.observed_rate for b in exact.calibration])
    assert (found.auc is None) == (exact.auc is None)
    if found.auc is not None and exact.auc is not None:
        assert abs(found.auc - exact.auc) <= found.auc_error + 1e-12


def test_known_values() -> None:
    assert area_under_curve(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8])) == 0.75
    found = metrics_of(np.array([1, 0, 0, 1]), np.array([0.9, 0.1, 0.2, 0.65]), 0.25)
    assert found.log_loss == pytest.approx(-np.log([0.9, 0.9, 0.8, 0.65]).mean())
    assert found.accuracy == 1.0
    assert found.baseline_log_loss == pytest.approx(-(math.log(0.25) + math.log(0.75)) / 2)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_each_row_is_in_one_calibration_bin(rows: list[tuple[int, float]]) -> None:
    truth, scores = np.array([r[0] for r in rows], np.float64), np.array([r[1] for r in rows], np.float64)
    bins = metrics_of(truth, scores, 0.5).calibration
    assert sum(b.rows for b in bins) == len(rows) and all(b.rows for b in bins)
    assert sum(b.rows * b.observed_rate for b in bins) == pytest.approx(truth.sum())
    assert sum(b.rows * b.mean_score for b in bins) == pytest.approx(scores.sum())
    tenths = [min(int(b.mean_score * CALIBRATION_BINS + 1e-9), CALIBRATION_BINS - 1) for b in bins]
    assert tenths == sorted(set(tenths))


def test_tally_counts_rows_of_one_bin_as_ties_and_says_so() -> None:
    close = 0.3 + np.array([0.0, 0.1]) / SCORE_BINS
    found = metrics_of_tally(tally(np.array([0.0, 1.0]), close), 0.5)
    assert (found.auc, found.auc_error) == (0.5, 0.5)
    assert metrics_of(np.array([0.0, 1.0]), close, 0.5).auc == 1.0


def test_log_loss_of_certain_and_wrong_is_finite() -> None:
    found = metrics_of(np.array([1.0, 0.0]), np.array([0.0, 0.0]), 0.5)
    assert found.log_loss == pytest.approx(-math.log(1e-7) / 2, rel=1e-6)
    assert found.baseline_log_loss == pytest.approx(math.log(2))


def test_labels_that_are_no_classes_give_errors_only() -> None:
    truth, scores = np.array([1.5, -2.0, 3.0]), np.array([1.0, -2.0, 5.0])
    for found in (metrics_of(truth, scores, 0.8), metrics_of_tally(tally(truth, scores), 0.8)):
        assert found.mean_squared_error == pytest.approx(4.25 / 3)
        assert found.mean_absolute_error == pytest.approx(2.5 / 3)
        assert found.auc is None and found.log_loss is None and found.calibration == ()


def test_one_part_that_is_no_classification_makes_the_table_none() -> None:
    parts = [tally(np.array([0.0, 1.0]), np.array([0.2, 0.7])), tally(np.array([2.0]), np.array([0.5]))]
    found = metrics_of_tally({name: np.concatenate([p[name] for p in parts]) for name in (*KEYS, *SUMS)}, 0.5)
    assert found.rows == 3 and found.auc is None and found.base_rate == 1.0


def test_metrics_survive_json() -> None:
    found = metrics_of(np.array([1.0, 0.0, 1.0]), np.array([0.9, 0.2, 0.4]), 0.4)
    assert Metrics.from_json(found.to_json()) == found
