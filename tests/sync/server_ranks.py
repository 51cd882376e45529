"""What ranks do in `test_parameter_server`: shards served without a model, and models trained in small worlds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.collectives.requests import Requests
from dl_on_spark.sync import Allreduce, ParameterServer, SyncStrategy
from dl_on_spark.sync.clocks import Clocks
from dl_on_spark.sync.server import PREFIX, ShardServer
from tests.collectives.processes import SECRET
from tests.sync.resuming import resumed
from tests.training.worlds import alone, build, columns, fit, weights

BOUNDS: list[int | None] = [0, 1, 2, 5, None]
BLOCK, TURNS = 3, 40


class Worker:
    """A rank that pushes to three-number shards, which add up what comes, and notes when it did what."""

    def __init__(self, comm: Communicator, requests: Requests, bound: int | None) -> None:
        self._rank, self._world, self._requests = comm.rank, comm.world_size, requests
        self._total = np.zeros(BLOCK)
        self.began: list[float] = []  # time at which a step's weights were there
        self.ended: list[float] = []  # time at which a step's gradient was pushed
        self.staleness: list[int] = []
        self.server = ShardServer(requests, Clocks(self._world, bound), self._add, np.dtype(np.float64))
        self._in = np.zeros((self._world, PREFIX + 8 * BLOCK), np.uint8)

    def step(self, work: Callable[[], None]) -> None:
        """Work, push a gradient of ones, and pull."""
        self.began.append(time.monotonic())
        work()
        row = np.concatenate([np.float64([1.0]).view(np.uint8), np.ones(BLOCK).view(np.uint8)])
        self.ended.append(time.monotonic())
        self._requests.ask([row.data] * self._world, [one.data for one in self._in], self.server.suspect)
        self.staleness.append(int(self._in[:, :PREFIX].copy().view(np.int64).max()))

    def finish(self) -> np.ndarray:
        """The shard when everybody is done."""
        self.server.finish(len(self.began))
        return self._total

    def _add(self, gradient: np.ndarray, rate: float, staleness: int) -> np.ndarray:
        self._total = self._total + rate * gradient
        return self._total


def requests_of(comm: Communicator) -> Requests:
    return comm.requests(PREFIX + 8 * BLOCK, PREFIX + 8 * BLOCK)


def served(comm: Communicator, pipe: Connection, seed: int) -> dict[Any, Any]:
    """Steps of random length under every bound, in two rounds on the same connections."""
    random = np.random.default_rng((seed, comm.rank))
    found: dict[Any, Any] = {}
    for bound in BOUNDS:
        requests = requests_of(comm)
        for turn in range(2):
            worker = Worker(comm, requests, bound)
            for _ in range(TURNS):
                pause = float(random.choice([0.0, 0.0005, 0.02], p=[0.5, 0.4, 0.1]))
                worker.step(lambda pause=pause: time.sleep(pause))
            found[bound, turn] = (worker.began, worker.ended, worker.staleness, worker.finish())
            comm.barrier()
        requests.close()
        pipe.send(("done with", bound))
    return found


def one_is_slow(comm: Communicator, pipe: Connection, bound: int | None) -> tuple[np.ndarray, int]:
    """Rank 0 takes its first step when it is told to; the others go on meanwhile."""
    requests = requests_of(comm)
    worker = Worker(comm, requests, bound)
    for turn in range(TURNS):
        worker.step(lambda first=turn == 0: pipe.recv() if first and comm.rank == 0 else None)
        pipe.send(("stepped", turn))
    total = worker.finish()
    comm.barrier()
    requests.close()
    return total, max(worker.staleness)


def one_fails(comm: Communicator, pipe: Connection, bound: int | None, how: str) -> None:
    """Rank 1 ends in its third step, or stops for good; the others must hear of it."""
    requests = requests_of(comm)
    worker = Worker(comm, requests, bound)

    def fail() -> None:
        if how == "raises":
            raise RuntimeError("broken on purpose")
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    try:
        for turn in range(TURNS):
            worker.step(fail if comm.rank == 1 and turn == 2 else lambda: None)
        worker.finish()
    finally:
        worker.server.stop()
        requests.close()


def one_thread(rank: int) -> None:
    """As on a worker of one core: an update that asks TensorFlow's pool for a thread would never come."""
    os.environ |= {"TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}


def optimizer_of(name: str) -> Any:
    import keras

    return {"SGD": lambda: keras.optimizers.SGD(0.1), "Adam": lambda: keras.optimizers.Adam(0.01)}[name]()


STRATEGIES: dict[str, SyncStrategy] = {
    "synchronous": ParameterServer(),
    "bounded": ParameterServer(2),
    "unbounded": ParameterServer(None, scale_by_staleness=True),
}


def trained(comm: Communicator, pipe: Connection, folder: str) -> dict[Any, Any]:
    """Models by how they were trained: (what, world size) -> what this rank has."""
    found: dict[Any, Any] = {}

    def done(name: Any, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", str(name)))

    for size in (3, 2, 1):  # ranks that have no part in the smaller worlds are done
        if comm.rank >= size:
            continue
        with Communicator.connect(comm.rank, size, f"file://{folder}/{size}", SECRET, host="127.0.0.1") as world:
            for optimizer in ("SGD", "Adam"):
                done((optimizer, size), _everything(world, ParameterServer(), optimizer))
            for name, strategy in STRATEGIES.items():
                if size == 3 or (size == 1 and name == "bounded"):
                    done((name, size), _losses(world, strategy))
            if size == 2:
                for name in ("synchronous", "unbounded"):
                    done(("resumed", name), _resumed(world, STRATEGIES[name]))
                done("refused", _refusal(world))
    if comm.rank == 0:
        for optimizer in ("SGD", "Adam"):
            done(("allreduce", optimizer), _everything(alone(), Allreduce(), optimizer))
    return found


def killed_while_training(comm: Communicator, pipe: Connection, staleness: int | None) -> None:
    """Rank 1 dies after two steps of a model's training."""
    import keras

    class Die(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    fit(comm, build(), ParameterServer(staleness), callbacks=[Die()], steps_per_execution=2)


def _everything(comm: Communicator, strategy: SyncStrategy, optimizer: str) -> tuple[list[np.ndarray], ...]:
    """Weights and the optimizer's state after two epochs."""
    model = build(optimizer_of(optimizer))
    fit(comm, model, strategy)
    assert "apply" not in vars(model.optimizer)
    return weights(model), [np.array(v) for v in model.optimizer.variables]


def _losses(comm: Communicator, strategy: SyncStrategy) -> tuple[float, float, Any, Any, list[np.ndarray]]:
    """Loss on all rows before and after an epoch, its history, its metrics and its weights."""
    table = columns()
    x, y = {name: table[name] for name in ("x", "category")}, table["y"]
    before = build().evaluate(x, y, verbose=0)
    model, sessions = build(optimizer_of("Adam"), batch_norm=True), []
    history = fit(comm, model, strategy, epochs=2, validate=True, restore=sessions.append)
    return before, model.evaluate(x, y, verbose=0), history, sessions[0].metrics(), weights(model)


def _refusal(comm: Communicator) -> tuple[str, str]:
    """Of a train_step that applies gradients of some weights only."""
    import keras

    class Half(keras.Model):
        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            half = self.trainable_variables[:2]
            self.optimizer.apply(tape.gradient(loss, half), half)
            return {"own_loss": loss}

    try:
        fit(comm, build(kind=Half), ParameterServer())
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def _resumed(comm: Communicator, strategy: SyncStrategy) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"weights": weights(m), "optimizer": [np.array(v) for v in m.optimizer.variables], "history": history}
        for m, _, history in resumed(comm, strategy, lambda: build(optimizer_of("Adam"), batch_norm=True))
    )
