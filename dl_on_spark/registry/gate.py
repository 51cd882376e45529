"""May the candidate replace the current model? A pure decision with its reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dl_on_spark.config import GateConfig
from dl_on_spark.errors import ConfigError, InputError
from dl_on_spark.registry.metrics import Metrics


@dataclass(frozen=True)
class Decision:
    """``reasons``: what was compared, one sentence each; the ``failures`` come first."""

    reasons: tuple[str, ...]
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def decide(candidate: Metrics, current: Metrics | None, gate: GateConfig) -> Decision:
    """Compare the candidate with floor, constant-rate baseline and the current model, on the same rows.

    A value that is not finite never passes. Raises `ConfigError` for a metric that the evaluation does not
    have, `InputError` when the rows are of one class and the metric is the AUC.
    """
    name, value = gate.metric, _value(candidate, gate.metric)
    sign = 1.0 if gate.direction == "max" else -1.0
    checks: list[tuple[bool, str]] = []
    if not math.isfinite(value):
        odd = (f"{name} is {value}",)
        return Decision(odd, odd)
    if gate.floor is not None:
        word = "at least" if sign > 0 else "at most"
        checks.append((sign * (value - gate.floor) >= 0, f"{name} {value:.4f}; {word} {gate.floor:.4f} is asked for"))
    baseline = _baseline(candidate, name)
    if baseline is not None:
        gain = sign * (value - baseline)
        asked = gate.min_gain_over_baseline
        checks.append(
            (
                gain >= asked,
                f"{name} {value:.4f} is {gain:+.4f} better than the constant rate ({asked:+.4f} is asked for)",
            )
        )
    if current is not None:
        before = _value(current, name)
        gain = sign * (value - before)
        checks.append(
            (
                gain >= -gate.tolerance,
                f"{name} {value:.4f} is {gain:+.4f} better than the current model's {before:.4f} on the same rows "
                f"({-gate.tolerance:+.4f} is tolerated)",
            )
        )
    ordered = sorted(checks, key=lambda check: check[0])
    return Decision(tuple(reason for _, reason in ordered), tuple(reason for passed, reason in ordered if not passed))


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
