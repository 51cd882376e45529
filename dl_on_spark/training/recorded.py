"""What a run writes down as it goes, and which of its checkpoints is the best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dl_on_spark.training.checkpoint import Manifest


@dataclass
class Recorded:
    """What the run has recorded so far; travels in the checkpoints' manifests."""

    history: dict[str, list[float]] = field(default_factory=dict)
    timed_rows: int = 0
    timed_seconds: float = 0.0
    bytes_sent: int = 0


def validation_loss(manifest: Manifest) -> float:
    """Greatest for the best epoch; a checkpoint inside an epoch has no metrics and is never the best."""
    metrics = manifest.metrics
    loss = metrics.get("val_loss", metrics.get("loss", math.inf))
    return -math.inf if math.isnan(loss) else -loss
