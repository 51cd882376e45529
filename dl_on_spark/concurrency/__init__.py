"""The theory: work and depth of models, and the cost of communication, as functions.

After Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning", ACM Computing Surveys 52(4), 2019
(arXiv 1802.09941), called "the survey" in this folder. Imports no other part of the package.
"""

from __future__ import annotations

from dl_on_spark.concurrency.communication import ALLREDUCE, Cost, Link
from dl_on_spark.concurrency.work_depth import LayerWork, ModelWork, work_of

__all__ = ["ALLREDUCE", "Cost", "LayerWork", "Link", "ModelWork", "work_of"]
