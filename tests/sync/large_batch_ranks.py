"""What each of two ranks does in `test_large_batch`: optimizers that clip, accumulate and measure layers."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import DLOnSparkError
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.sync import Allreduce, ElasticAveraging, Gossip, LocalSGD, Stepped, SyncStrategy
from dl_on_spark.training import state
from tests.training.worlds import alone, build, fit, weights

EPOCHS = 2
SYNCHRONOUS = Allreduce()
REFUSED: dict[str, SyncStrategy] = {
    "local": LocalSGD(every=4),
    "post-local": LocalSGD(every=6, start_at=2),
    "stepped": LocalSGD(every=Stepped(((0, 6), (9, 4)))),
    "elastic": ElasticAveraging(every=4),
    "gossip": Gossip(every=2),
}


def optimizers() -> dict[str, Callable[[], Any]]:
    """Optimizers whose steps on two ranks must be those of one. Their limits cut most steps."""
    import keras

    from dl_on_spark.training.optimizers import Lars
    from dl_on_spark.training.schedules import large_batch_rate

    kinds = keras.optimizers

    def scaled(initial_scale: float, **options: Any) -> Any:
        return kinds.LossScaleOptimizer(kinds.SGD(0.1, **options), initial_scale=initial_scale)

    return {
        "clipnorm": lambda: kinds.SGD(0.5, clipnorm=0.02),
        "clipvalue": lambda: kinds.SGD(0.5, clipvalue=0.01),
        "global_clipnorm": lambda: kinds.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
        "lars": lambda: Lars(large_batch_rate(5.0, base_batch=16, batch=32, warm_up_steps=9), trust=0.01),
        "lamb": lambda: kinds.Lamb(0.01),
        "accumulating": lambda: kinds.SGD(0.5, momentum=0.9, gradient_accumulation_steps=3),
        "accumulating, clipped": lambda: kinds.Adam(0.05, global_clipnorm=0.05, gradient_accumulation_steps=3),
        "accumulating to an epoch's end": lambda: kinds.SGD(0.5, gradient_accumulation_steps=7),
        "accumulating, scaled": lambda: scaled(2.0**10, gradient_accumulation_steps=3),
    }


def run(comm: Communicator, pipe: Connection) -> dict[Any, Any]:
    """By what was done; under ("alone", name) the weights of one process (rank 0 only)."""
    import keras

    found: dict[Any, Any] = {}

    def done(name: Any, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", str(name)))

    def trained(among: Communicator, optimizer: Any, strategy: SyncStrategy = SYNCHRONOUS, **options: Any) -> Any:
        model = build(optimizer, **options)
        fit(among, model, strategy, epochs=EPOCHS)
        return weights(model)

    for name, optimizer in optimizers().items():
        before, calls = comm.bytes_sent, _Counting(comm)
        one = optimizer()
        done(name, trained(calls, one))
        found[name, "bytes"], found[name, "exchanges"] = comm.bytes_sent - before, calls.exchanges
        found[name, "iterations"] = int(np.array(one.iterations))
        inner = getattr(one, "inner_optimizer", one)
        found[name, "wrapped"] = "apply" in vars(one) or "_clip_gradients" in vars(inner)
    calls = _Counting(comm)
    before = comm.bytes_sent
    done("plain", trained(calls, keras.optimizers.SGD(0.5)))
    found["plain", "bytes"], found["plain", "exchanges"] = comm.bytes_sent - before, calls.exchanges
    accumulating = optimizers()["accumulating"]
    done("eager", trained(comm, accumulating(), run_eagerly=True))
    done("compressed", trained(comm, accumulating(), Allreduce(compress="fp16")))
    # The loss overflows on one rank only: rank 1's rows alone are huge there.
    done("overflow", _overflowing(comm))
    done("resumed", _resumed(comm))
    for name, strategy in REFUSED.items():
        done(("refused", name), _refusal(lambda strategy=strategy: trained(comm, accumulating(), strategy)))
    for strategy in (LocalSGD(every=6), ElasticAveraging(every=3), Gossip(every=3)):
        done(f"rounds {strategy}", trained(comm, accumulating(), strategy))
    for name, optimizer in {"lamb": keras.optimizers.Lamb(), "lars": optimizers()["lars"]()}.items():
        action = lambda optimizer=optimizer: trained(comm, optimizer, Allreduce(compress="topk"))  # noqa: E731
        done(("parts", name), _refusal(action))
    if comm.rank == 0:
        for name, optimizer in optimizers().items():
            done(("alone", name), trained(alone(), optimizer()))
        done(("alone", "overflow"), _overflowing(alone()))
    return found


class _Counting:
    """A communicator that remembers how many numbers each allreduce sums."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.exchanges = comm, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, array: np.ndarray, *options: Any) -> np.ndarray:
        self.exchanges.append(array.size)
        return self._comm.allreduce(array, *options)


def _refusal(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except DLOnSparkError as error:
        return type(error).__name__, str(error)
    return "none", ""


def _overflowing(comm: Communicator) -> tuple[list[np.ndarray], float]:
    """A loss scale at first so large that gradients overflow in some rows, so batches are skipped."""
    import keras

    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = build(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127), loss_weights=[2.0])
    fit(comm, model, Allreduce(), epochs=EPOCHS)
    return weights(model), float(model.optimizer.dynamic_scale.numpy())


def _resumed(comm: Communicator) -> list[list[np.ndarray]]:
    """Weights of a whole run and of its continuation on two ranks and (rank 0) on one, from between two updates."""
    saved: dict[str, Any] = {}
    make = optimizers()["accumulating"]

    class Save:
        def steps_until_due(self, cursor: Cursor) -> int | None:
            return 5 - cursor.step if cursor.step < 5 else None

        def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
            if cursor == Cursor(0, 5):
                sessions[0].finish_epoch(5)
                saved["weights"], saved["optimizer"] = state.weights_of(whole), state.optimizer_of(whole)
                saved["session"] = safetensors.load(safetensors.save(sessions[0].state()))

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            return

    sessions: list[Any] = []
    whole = build(make())
    fit(comm, whole, Allreduce(), epochs=EPOCHS, restore=sessions.append, hooks=[Save()])
    found = [weights(whole)]
    for among in [comm, alone()] if comm.rank == 0 else [comm]:
        again = build(make())

        def restore(session: Any, again: Any = again) -> None:
            state.load_weights(again, saved["weights"])
            state.load_optimizer(again, saved["optimizer"])
            session.load_state(saved["session"])
            session.set_step(5)

        fit(among, again, Allreduce(), epochs=EPOCHS, start=Cursor(0, 5), restore=restore)
        found.append(weights(again))
    return found
