"""Training and scoring as pyspark.ml knows them: an Estimator over `Trainer`, and the Model it fits."""

from __future__ import annotations

from dl_on_spark.ml.estimator import KerasEstimator
from dl_on_spark.ml.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
