"""The run: the driver's Trainer; the worker's side is imported in the workers alone."""

from __future__ import annotations

from dl_on_spark.training.result import TrainingResult
from dl_on_spark.training.trainer import Trainer

__all__ = ["Trainer", "TrainingResult"]
