"""The gate: what passes, and the reasons it gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.config import GateConfig
from dl_on_spark.errors import ConfigError, InputError
from dl_on_spark.registry import Decision, Judgement, Metrics
from dl_on_spark.registry import decide as decide_on
from dl_on_spark.registry.bootstrap import Interval
from dl_on_spark.registry.comparison import Comparison, SliceResult


def _metrics(**values: Any) -> Metrics:
    given = {"auc": 0.7, "log_loss": 0.5, "accuracy": 0.8, "baseline_log_loss": 0.6, **values}
    return Metrics(100, "rows", 0.25, 0.3, 0.15, 0.3, **given)


def decide(candidate: Metrics, current: Metrics | None, gate: GateConfig, **more: Any) -> Decision:
    """The decision on a candidate whose interval is 0.01 wide on both sides."""
    found = Comparison(gate.metric, 0.95, 100, slices=more.get("slices", ()))
    if current is not None:
        new, old = getattr(candidate, gate.metric), getattr(current, gate.metric)
        gap = Interval(new - old, new - old - 0.01, new - old + 0.01)
        found = Comparison(gate.metric, 0.95, 100, (), 0, more.get("slices", ()), "digest", 1, old, gap)
    return decide_on(Judgement(candidate, found, more.get("drift", {})), gate)


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


def test_the_lower_end_of_the_interval_decides_where_that_is_asked_for() -> None:
    gate = GateConfig(tolerance=0.005, compare="lower_bound")
    refused = decide(_metrics(auc=0.703), _metrics(auc=0.7), gate)
    assert "0.0030 better than the current model's 0.7000" in refused.failures[0]
    assert "95% interval -0.0070 to +0.0130" in refused.failures[0]
    assert decide(_metrics(auc=0.706), _metrics(auc=0.7), gate).passed
    less = GateConfig(metric="log_loss", tolerance=0.005, compare="lower_bound")
    assert decide(_metrics(log_loss=0.494), _metrics(log_loss=0.5), less).passed
    assert not decide(_metrics(log_loss=0.497), _metrics(log_loss=0.5), less).passed


@pytest.mark.parametrize(
    ("gap", "passes"),
    [
        (Interval(-0.03, -0.05, -0.01), False),
        (Interval(-0.03, -0.07, 0.01), True),  # may be chance
        (Interval(-0.015, -0.02, -0.01), True),  # sure, and tolerated
        (Interval(0.03, 0.01, 0.05), True),
    ],
)
def test_a_slice_that_lost_more_than_is_tolerated_beyond_chance_is_named(gap: Interval, passes: bool) -> None:
    slices = (SliceResult("carrier", "UA", 500, 0.7 + gap.value, 0.7, gap),)
    decision = decide(_metrics(), _metrics(), GateConfig(slices=("carrier",), max_slice_loss=0.02), slices=slices)
    assert decision.passed == passes
    if not passes:
        assert decision.failures[0].startswith("carrier=UA (500 rows): auc 0.6700 is 0.0300 worse")
        assert (decision.checks[0].what, decision.checks[0].have, decision.checks[0].need) == (
            "carrier=UA",
            -0.03,
            -0.02,
        )


def test_calibration_and_drift_have_limits_of_their_own() -> None:
    gate = GateConfig(max_calibration_error=0.05, max_drift=0.25)
    refused = decide(_metrics(calibration_error=0.06), None, gate, drift={"a": 0.1, "b": 0.3, "c": 0.26})
    assert [check.what for check in refused.checks if not check.passed] == ["calibration", "drift of b", "drift of c"]
    assert decide(_metrics(calibration_error=0.05), None, gate, drift={"a": 0.1}).passed
    assert "not known" in decide(_metrics(calibration_error=0.05), None, gate).failures[0]
    with pytest.raises(ConfigError, match="no probabilities"):
        decide(_metrics(), None, gate)
