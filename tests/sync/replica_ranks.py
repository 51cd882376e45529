"""What each of four ranks does in `test_replicas`: elastic averaging and gossip in worlds of one to four."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.sync import Allreduce, ElasticAveraging, Gossip, LocalSGD, StepRows, SyncSession, SyncStrategy
from dl_on_spark.sync.base import FlatVariables
from tests.collectives.processes import SECRET
from tests.sync.ranks import Silent
from tests.sync.resuming import copies, resumed
from tests.training.worlds import PLAN, alone, build, columns, fit, weights

ROUND, ROUNDS = 2, 3
STRATEGIES: dict[str, SyncStrategy] = {
    "elastic": ElasticAveraging(every=ROUND),
    "ring": Gossip(every=ROUND),
    "exponential": Gossip("exponential", every=ROUND),
}
WORLDS = range(1, 5)


def progress(rank: int, turn: int, size: int) -> np.ndarray:
    """What a rank's replica moves by in a round: shape (size,)."""
    return np.random.default_rng((rank, turn)).normal(size=size).astype(np.float32)


def run(comm: Communicator, pipe: Connection, folder: str) -> dict[Any, Any]:
    """By what was done: (name, world size) -> what this rank has."""
    found: dict[Any, Any] = {}

    def done(name: Any, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", str(name)))

    for size in WORLDS:
        if comm.rank >= size:
            continue
        rendezvous = f"file://{folder}/{size}"
        with Communicator.connect(comm.rank, size, rendezvous, SECRET, host="127.0.0.1") as world:
            for name, strategy in STRATEGIES.items():
                done(("rounds", name, size), _rounds(world, strategy))
            if size in {1, 4}:
                for strategy in (ElasticAveraging(), Gossip()):
                    done((str(strategy), size), _losses(world, strategy))
            if size in {2, 3}:
                mean = ElasticAveraging(alpha=1 / size, every=100)
                done(("center", size), _trained(world, mean, epochs=1))
                done(("local", size), _trained(world, LocalSGD(every=100), epochs=1))
                done(("mixed by all", size), _trained(world, Gossip()))
            if size == 3:
                for name in ("elastic", "exponential"):
                    done(("resumed", name), _resumed(world, STRATEGIES[name]))
    if comm.rank == 0:
        done("synchronous", _trained(alone(), Allreduce()))
        done("gossip alone", _trained(alone(), Gossip()))
        done("undisturbed", _trained(alone(), Silent()))
    comm.barrier()
    return found


def _trained(comm: Communicator, strategy: SyncStrategy, **options: Any) -> list[np.ndarray]:
    model = build()
    fit(comm, model, strategy, **options)
    return weights(model)


def _rounds(comm: Communicator, strategy: SyncStrategy) -> dict[str, Any]:
    """Rounds whose local steps are replaced by `progress`, then the published weights, and what follows."""
    model = build()
    session = strategy.start(model, comm, StepRows(PLAN, comm.rank, comm.world_size))
    flat = FlatVariables(list(model.trainable_weights))
    found: dict[str, Any] = {"start": flat.read(), "replicas": []}
    for turn in range(ROUNDS):
        step = turn * ROUND
        session.before_steps(step)
        assert session.steps_until_exchange(step) in {ROUND, None}
        flat.write(flat.read() + progress(comm.rank, turn, found["start"].size))
        session.after_steps(step + ROUND)
        if turn < ROUNDS - 1:
            found["replicas"].append(flat.read())
    session.finish_epoch(ROUNDS * ROUND)
    session.finish_epoch(ROUNDS * ROUND)  # nothing was trained since: nothing moves
    found |= {"published": flat.read(), "metrics": session.metrics(), "state": copies(session)}
    found["replicas"].append(found["state"]["replica"])

    moved = flat.read() + np.float32(0.5)  # as a callback may
    flat.write(moved)
    session.before_steps(ROUNDS * ROUND)
    found["after a callback"] = flat.read()

    flat.write(found["published"])
    session.load_state({**found["state"], "world_size": np.array(5)})
    session.before_steps(ROUNDS * ROUND)
    found["of another world"] = flat.read()
    return found


def _losses(comm: Communicator, strategy: SyncStrategy) -> tuple[float, float, dict[str, list[float]]]:
    """Loss on all rows before and after one epoch, and its history."""
    table = columns()
    x, y = {name: table[name] for name in ("x", "category")}, table["y"]
    before = build().evaluate(x, y, verbose=0)
    model = build()
    history = fit(comm, model, strategy, epochs=1, validate=True)
    return before, model.evaluate(x, y, verbose=0), history


def _resumed(comm: Communicator, strategy: SyncStrategy) -> tuple[dict[str, Any], ...]:
    return tuple(_everything(*run) for run in resumed(comm, strategy, _with_slots))


def _with_slots() -> Any:
    import keras

    return build(keras.optimizers.Adam(0.01), batch_norm=True)


def _everything(model: Any, session: SyncSession, history: Any) -> dict[str, Any]:
    from dl_on_spark.training import state

    distances = history["consensus_distance"][-2:]
    return {
        "weights": weights(model),
        "optimizer": list(state.optimizer_of(model).values()),
        "state": list(copies(session).values()),
        "distances": [np.array(distances)],
    }
