"""The theory: work and depth of models, the cost of communication, and a planner, as functions.

After Ben-Nun and Hoefler, "Demystifying Parallel and Distributed Deep Learning", ACM Computing Surveys 52(4), 2019
(arXiv 1802.09941), called "the survey" in this folder. Imports no other part of the package.
Reading order: ``layers``, ``work_depth``, ``communication``, ``stragglers``, ``workload``, ``ways``, ``planner``,
``simulation``.
"""

from __future__ import annotations

from dl_on_spark.concurrency.communication import ALLREDUCE, EXCHANGES, Cost, Link
from dl_on_spark.concurrency.planner import Estimate, Plan, batches, estimate, plan
from dl_on_spark.concurrency.simulation import Simulated, simulate, simulate_failures
from dl_on_spark.concurrency.ways import WAYS, StepTime, Way
from dl_on_spark.concurrency.work_depth import LayerWork, ModelWork, work_of
from dl_on_spark.concurrency.workload import Cluster, Shape, Workload, device_row_s

__all__ = [
    "ALLREDUCE",
    "EXCHANGES",
    "WAYS",
    "Cluster",
    "Cost",
    "Estimate",
    "LayerWork",
    "Link",
    "ModelWork",
    "Plan",
    "Shape",
    "Simulated",
    "StepTime",
    "Way",
    "Workload",
    "batches",
    "device_row_s",
    "estimate",
    "plan",
    "simulate",
    "simulate_failures",
    "work_of",
]
