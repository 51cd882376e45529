"""dl_on_spark: train TensorFlow/Keras models in place on the tables of a Spark cluster.

Exports are lazy: importing this package imports neither TensorFlow nor Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Allreduce",
    "ElasticAveraging",
    "Gossip",
    "KerasEstimator",
    "KerasModel",
    "LocalSGD",
    "ParameterServer",
    "Schema",
    "StageAveraging",
    "Trainer",
    "TrainingResult",
    "__version__",
    "open_table",
    "plan",
]

_EXPORTS = {
    "Allreduce": "dl_on_spark.sync",
    "ElasticAveraging": "dl_on_spark.sync",
    "Gossip": "dl_on_spark.sync",
    "KerasEstimator": "dl_on_spark.ml",
    "KerasModel": "dl_on_spark.ml",
    "LocalSGD": "dl_on_spark.sync",
    "ParameterServer": "dl_on_spark.sync",
    "Schema": "dl_on_spark.lake",
    "StageAveraging": "dl_on_spark.sync",
    "Trainer": "dl_on_spark.training",
    "TrainingResult": "dl_on_spark.training",
    "open_table": "dl_on_spark.input_pipeline",
    "plan": "dl_on_spark.concurrency",
}

if TYPE_CHECKING:
    from dl_on_spark.concurrency import plan
    from dl_on_spark.input_pipeline import open_table
    from dl_on_spark.lake import Schema
    from dl_on_spark.ml import KerasEstimator, KerasModel
    from dl_on_spark.sync import Allreduce, ElasticAveraging, Gossip, LocalSGD, ParameterServer, StageAveraging
    from dl_on_spark.training import Trainer, TrainingResult


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dl_on_spark' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
