"""What a finished training run leaves: history, metrics, the model's place and what it cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class TrainingResult:
    """Outcome of `Trainer.fit`.

    ``history``: each metric's value over all rows, an entry an epoch. ``metrics``: the last epoch's.
    ``seconds_by_rank``: where each worker's time went since its last start (`step_clock.StepSeconds`).
    ``rows_per_second``: rows trained on by all workers per second of the epochs, without start-up,
    the first traced steps and validation. ``bytes_sent``: payload that all workers sent to each other.
    """

    history: dict[str, list[float]]
    metrics: dict[str, float]
    model_path: str
    run_dir: str
    rows_per_second: float
    bytes_sent: int
    restarts: int
    steps: int
    epochs: int
    workers: int
    rows_per_epoch: int
    seconds: float
    seconds_by_rank: list[dict[str, float]] = field(default_factory=list)

    def to_json(self) -> str:
        """All of the result as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> TrainingResult:
        """The result that `to_json` wrote."""
        return cls(**json.loads(text))
