"""Is the model good enough, and which one is current?"""

from __future__ import annotations

from dl_on_spark.registry.evaluate import evaluate
from dl_on_spark.registry.gate import Decision, decide
from dl_on_spark.registry.judgement import Judgement, judge
from dl_on_spark.registry.metrics import Metrics, metrics_of
from dl_on_spark.registry.predictions import SavedModel
from dl_on_spark.registry.versions import Registry, Version

__all__ = [
    "Decision",
    "Judgement",
    "Metrics",
    "Registry",
    "SavedModel",
    "Version",
    "decide",
    "evaluate",
    "judge",
    "metrics_of",
]
