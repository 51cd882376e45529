"""May the candidate replace the current model? A pure decision with its reasons."""

from __future__ import annotations

from dataclasses import dataclass

from dl_on_spark.config import GateConfig
from dl_on_spark.errors import ConfigError
from dl_on_spark.registry.evaluate import Metrics


@dataclass(frozen=True)
class Decision:
    """``reasons``: what was compared, one sentence each; those that failed come first."""

    passed: bool
    reasons: tuple[str, ...]


def decide(candidate: Metrics, current: Metrics | None, gate: GateConfig) -> Decision:
    """Compare the candidate with floor, constant-rate baseline and the current model, on the same rows.

    Raises `ConfigError` for a metric that the evaluation does not have.
    """
    name, value = gate.metric, _value(candidate, gate.metric)
    sign = 1.0 if gate.direction == "max" else -1.0
    checks: list[tuple[bool, str]] = []
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
    return Decision(all(passed for passed, _ in checks), tuple(reason for _, reason in ordered))


def _value(metrics: Metrics, name: str) -> float:
    value = getattr(metrics, name, None)
    if not isinstance(value, float):
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
