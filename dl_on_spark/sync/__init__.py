"""When workers exchange what: strategies are frozen descriptions and import no TensorFlow."""

from __future__ import annotations

from dl_on_spark.sync.allreduce import Allreduce
from dl_on_spark.sync.base import StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.elastic_averaging import ElasticAveraging
from dl_on_spark.sync.gossip import Gossip
from dl_on_spark.sync.local_sgd import LocalSGD, Momentum, Nesterov
from dl_on_spark.sync.parameter_server import ParameterServer
from dl_on_spark.sync.registry import STRATEGIES, parse_sync
from dl_on_spark.sync.schedule import Quadratic, Stepped
from dl_on_spark.sync.stage_averaging import StageAveraging

__all__ = [
    "STRATEGIES",
    "Allreduce",
    "ElasticAveraging",
    "Gossip",
    "LocalSGD",
    "Momentum",
    "Nesterov",
    "ParameterServer",
    "Quadratic",
    "StageAveraging",
    "StepRows",
    "Stepped",
    "SyncSession",
    "SyncStrategy",
    "parse_sync",
]
