"""What ranks do in `test_parameter_server`: synchronous, bounded and unbounded, in worlds of one to three."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.sync import Allreduce, ParameterServer, SyncSession, SyncStrategy
from tests.collectives.processes import SECRET
from tests.training.worlds import PLAN, alone, build, columns, fit, weights

STEPS = PLAN.steps_per_epoch
PAUSE = Cursor(1, 3)
BOUND = 2


def optimizers() -> dict[str, Any]:
    """Every optimizer that a shard's owner can apply, by name; with momentum, schedules and clipping."""
    import keras

    of = keras.optimizers
    falling = of.schedules.ExponentialDecay(0.1, 4, 0.5)
    return {
        "SGD": lambda: of.SGD(0.1),
        "SGD, momentum": lambda: of.SGD(0.1, momentum=0.9, nesterov=True),
        "SGD, schedule": lambda: of.SGD(falling, momentum=0.9),
        "SGD, loss scale": lambda: of.SGD(0.1, loss_scale_factor=8.0),
        "Adam": lambda: of.Adam(0.01),
        "Adam, amsgrad, clipvalue": lambda: of.Adam(0.01, amsgrad=True, clipvalue=0.02),
        "AdamW": lambda: of.AdamW(0.01, weight_decay=0.1),
        "RMSprop": lambda: of.RMSprop(0.01, momentum=0.5, centered=True),
        "Adagrad": lambda: of.Adagrad(0.05),
        "Adadelta": lambda: of.Adadelta(1.0),
        "Adamax": lambda: of.Adamax(0.01),
        "Nadam": lambda: of.Nadam(0.01),
        "Ftrl": lambda: of.Ftrl(0.05, l1_regularization_strength=0.001),
        "Lion": lambda: of.Lion(0.005),
    }


IN_ALL_WORLDS = ("SGD", "Adam", "Nadam")


def run(comm: Communicator, pipe: Connection, folder: str) -> dict[Any, Any]:
    """By what was done: (name, world size) -> what this rank has."""
    found: dict[Any, Any] = {}

    def done(name: Any, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", str(name)))

    for size in (1, 2, 3):
        if comm.rank >= size:
            continue
        with Communicator.connect(comm.rank, size, f"file://{folder}/{size}", SECRET, host="127.0.0.1") as world:
            for name, make in optimizers().items():
                if size != 2 and name not in IN_ALL_WORLDS:
                    continue
                done((name, size), _trained(world, ParameterServer(), make()))
                if size > 1:
                    done((name, "bounded", size), _trained(world, ParameterServer(BOUND), make()))
            for strategy in (ParameterServer(0), ParameterServer(BOUND), ParameterServer(None, True)):
                done((str(strategy), size), _losses(world, strategy))
    return found
