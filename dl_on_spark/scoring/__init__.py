"""The current model over a table."""

from __future__ import annotations

from dl_on_spark.scoring.score import ScoreReport, score

__all__ = ["ScoreReport", "score"]
