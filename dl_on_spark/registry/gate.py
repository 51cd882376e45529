"""May the candidate replace the current model? A pure decision with its reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dl_on_spark.config import GateConfig
from dl_on_spark.errors import ConfigError, InputError
from dl_on_spark.registry.comparison import Comparison, SliceResult
from dl_on_spark.registry.judgement import Judgement
from dl_on_spark.registry.metrics import Metrics


@dataclass(frozen=True)
class Check:
    """One thing that was asked for. ``have`` and ``need``: the numbers; ``reason``: the sentence for people."""

    what: str
    passed: bool
    have: float | None
    need: float | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """``checks``: those that failed come first."""

    checks: tuple[Check, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was compared, one sentence each."""
        return tuple(check.reason for check in self.checks)

    @property
    def failures(self) -> tuple[str, ...]:
        """The reasons against it."""
        return tuple(check.reason for check in self.checks if not check.passed)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def decide(judged: Judgement, gate: GateConfig) -> Decision:
    """Compare the candidate with floor, constant-rate baseline and the current model, overall and in each slice.

    A value that is not finite never passes. Raises `ConfigError` for a metric that the evaluation does not
    have, `InputError` when the rows are of one class and the metric is the AUC.
    """
    value = _value(judged.metrics, gate.metric)
    if not math.isfinite(value):
        return Decision((Check(gate.metric, False, None, gate.floor, f"{gate.metric} is {value}"),))
    checks = [
        *_absolute(judged.metrics, value, gate),
        *_against_current(judged.comparison, value, gate),
        *_slices(judged.comparison, gate),
        *_calibration(judged.metrics, gate),
        *_drift(judged.drift, gate),
    ]
    return Decision(tuple(sorted(checks, key=lambda check: check.passed)))


def _absolute(metrics: Metrics, value: float, gate: GateConfig) -> Iterator[Check]:
    name, sign = gate.metric, _sign(gate)
    if gate.floor is not None:
        word = "at least" if sign > 0 else "at most"
        reason = f"{name} {value:.4f}; {word} {gate.floor:.4f} is asked for"
        yield Check("floor", sign * (value - gate.floor) >= 0, value, gate.floor, reason)
    baseline = _baseline(metrics, name)
    if baseline is not None:
        gain, asked = sign * (value - baseline), gate.min_gain_over_baseline
        reason = f"{name} {value:.4f} is {_better(gain)} than the constant rate ({asked:+.4f} is asked for)"
        yield Check("baseline", gain >= asked, gain, asked, reason)


def _against_current(found: Comparison, value: float, gate: GateConfig) -> Iterator[Check]:
    if found.before is None:
        return
    gain, low, high = _sign(gate) * (value - found.before), -math.inf, math.inf
    interval = "no interval"
    if found.difference is not None:
        low, high = sorted((_sign(gate) * found.difference.low, _sign(gate) * found.difference.high))
        interval = f"{found.confidence:.0%} interval {low:+.4f} to {high:+.4f}"
    judged = gain if gate.compare == "difference" else low
    reason = (
        f"{gate.metric} {value:.4f} is {_better(gain)} than the current model's {found.before:.4f} on the same rows "
        f"({interval} on {found.rows:,} rows; {_of(gate)} {-gate.tolerance:+.4f} is tolerated)"
    )
    yield Check("current model", judged >= -gate.tolerance, judged, -gate.tolerance, reason)


def _slices(found: Comparison, gate: GateConfig) -> Iterator[Check]:
    """A check for each slice that got worse, and one for all others."""
    compared = [one for one in found.slices if one.difference is not None]
    worse = [one for one in compared if is_worse(one, gate)]
    for one in sorted(worse, key=lambda one: _gain(one, gate)):
        gain = _gain(one, gate)
        reason = (
            f"{one.name} ({one.rows:,} rows): {gate.metric} {one.candidate:.4f} is {_better(gain)} than the current "
            f"model's {one.current:.4f}, beyond chance ({-gate.max_slice_loss:+.4f} is tolerated)"
        )
        yield Check(one.name, False, gain, -gate.max_slice_loss, reason)
    if compared and not worse:
        least = min(compared, key=lambda one: _gain(one, gate))
        reason = (
            f"none of {len(compared)} slices is worse by more than {gate.max_slice_loss:.4f} beyond chance "
            f"(least: {least.name} {_gain(least, gate):+.4f})"
        )
        yield Check("slices", True, _gain(least, gate), -gate.max_slice_loss, reason)


def is_worse(one: SliceResult, gate: GateConfig) -> bool:
    """Whether a slice lost more than is tolerated, and its interval says that the loss is none of chance."""
    if one.difference is None:
        return False
    best = max(_sign(gate) * one.difference.low, _sign(gate) * one.difference.high)
    return _gain(one, gate) < -gate.max_slice_loss and best < 0


def _gain(one: SliceResult, gate: GateConfig) -> float:
    return 0.0 if one.difference is None else _sign(gate) * one.difference.value


def _calibration(metrics: Metrics, gate: GateConfig) -> Iterator[Check]:
    error, most = metrics.calibration_error, gate.max_calibration_error
    if most is None:
        return
    if error is None:
        raise ConfigError(
            "gate.max_calibration_error: these scores are no probabilities of a label of 0 and 1.",
            fix="Leave that entry out.",
        )
    reason = f"expected calibration error {error:.4f}; at most {most:.4f} is asked for"
    yield Check("calibration", error <= most, error, most, reason)


def _drift(found: dict[str, float], gate: GateConfig) -> Iterator[Check]:
    """A check for each feature that moved too far, or one for all."""
    most = gate.max_drift
    if most is None:
        return
    if not found:
        reason = "drift of the inputs is not known: the training rows could not be read"
        yield Check("drift", False, None, most, reason)
        return
    ranked = sorted(found.items(), key=lambda item: -item[1])
    for name, index in [item for item in ranked if item[1] > most] or ranked[:1]:
        word = "drift" if index > most else "largest drift"
        reason = f"{word} of {name}: stability index {index:.3f}; at most {most:.3f} is asked for"
        yield Check(f"drift of {name}", index <= most, index, most, reason)


def _sign(gate: GateConfig) -> float:
    return 1.0 if gate.direction == "max" else -1.0


def _better(gain: float) -> str:
    return f"{abs(gain):.4f} {'better' if gain >= 0 else 'worse'}"


def _of(gate: GateConfig) -> str:
    return "a difference of" if gate.compare == "difference" else "a lower end of"


def _value(metrics: Metrics, name: str) -> float:
    value = getattr(metrics, name, None)
    if not isinstance(value, float):
        if name == "auc" and metrics.log_loss is not None:
            raise InputError("the held-out rows have one class only: no AUC.", fix="Hold out more days.")
        known = [key for key, found in vars(metrics).items() if isinstance(found, float)]
        raise ConfigError(f"gate.metric {name!r} is not among the metrics.", fix=f"Known: {', '.join(known)}.")
    return value


def _baseline(metrics: Metrics, name: str) -> float | None:
    """What a constant prediction reaches."""
    rate, base = metrics.baseline_rate, metrics.base_rate
    return {
        "auc": 0.5,
        "log_loss": metrics.baseline_log_loss,
        "accuracy": base if rate >= 0.5 else 1 - base,
        "mean_squared_error": None if metrics.auc is None else base * (1 - base) + (rate - base) ** 2,
    }.get(name)
