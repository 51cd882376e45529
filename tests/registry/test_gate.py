"""The gate: what passes, and the reasons it gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.config import GateConfig
from dl_on_spark.errors import ConfigError, InputError
from dl_on_spark.registry import Metrics, decide


def _metrics(**values: Any) -> Metrics:
    given = {"auc": 0.7, "log_loss": 0.5, "accuracy": 0.8, "baseline_log_loss": 0.6, **values}
    return Metrics(100, "rows", 0.25, 0.3, 0.15, 0.3, **given)


def test_without_a_current_model_floor_and_baseline_decide() -> None:
    assert decide(_metrics(auc=0.7), None, GateConfig(floor=0.6)).passed
    refused = decide(_metrics(auc=0.55), None, GateConfig(floor=0.6, min_gain_over_baseline=0.1))
    assert not refused.passed and len(refused.failures) == 2
    assert "at least 0.6000" in refused.failures[0]
    assert "constant rate" in refused.failures[1]


@given(st.floats(0.5, 1), st.floats(0.5, 1), st.floats(0, 0.3))
def test_a_worse_model_passes_only_within_the_tolerance(new: float, old: float, tolerance: float) -> None:
    decision = decide(_metrics(auc=new), _metrics(auc=old), GateConfig(tolerance=tolerance))
    assert decision.passed == (new - old >= -tolerance)
    assert set(decision.failures) <= set(decision.reasons)


def test_where_less_is_better_the_comparison_turns() -> None:
    gate = GateConfig(metric="log_loss", floor=0.55)  # the direction is that of the metric
    assert decide(_metrics(log_loss=0.5), _metrics(log_loss=0.52), gate).passed
    assert not decide(_metrics(log_loss=0.53), _metrics(log_loss=0.52), gate).passed
    assert not decide(_metrics(log_loss=0.58), None, gate).passed


def test_accuracy_is_compared_with_the_more_frequent_class_of_training() -> None:
    gate = GateConfig(metric="accuracy")
    assert decide(_metrics(accuracy=0.76), None, gate).passed
    assert not decide(_metrics(accuracy=0.74), None, gate).passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_passes(value: float) -> None:
    assert not decide(_metrics(log_loss=value), None, GateConfig(metric="log_loss", direction="min")).passed
    assert not decide(_metrics(auc=value), None, GateConfig()).passed


def test_a_metric_that_the_rows_do_not_have_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'accuracy'.*auc, "):
        decide(_metrics(accuracy=None), None, GateConfig(metric="accuracy"))


def test_rows_of_one_class_have_no_auc_and_the_message_says_so() -> None:
    with pytest.raises(InputError, match=r"one class only.*Hold out more days"):
        decide(_metrics(auc=None), None, GateConfig())
