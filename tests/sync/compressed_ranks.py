"""What each of two ranks does in `test_compression`: training under every codec, whole and resumed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from safetensors import numpy as safetensors

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.sync import Allreduce
from dl_on_spark.training import state
from tests.training.worlds import PLAN, alone, build, fit, weights

HALF = 3  # steps of the first epoch before the checkpoint
EPOCHS = 3


def scaled() -> Any:
    """A model whose loss scale is at first so large that gradients are infinite, so steps are skipped."""
    import keras

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1 / 8), initial_scale=2.0**127)
    return build(optimizer, loss_weights=[8.0])


def run(comm: Communicator, pipe: Connection, codecs: list[str]) -> dict[str, Any]:
    """By codec: weights after training, after a resumed training, losses; eagerly, to trace nothing."""
    found: dict[str, Any] = {}

    def done(name: str, value: Any) -> None:
        found[name] = value
        pipe.send(("done with", name))

    for text in codecs:
        done(text, _whole_and_resumed(comm, Allreduce(compress=text), run_eagerly=True))
    done("in a graph", _whole_and_resumed(comm, Allreduce(compress="fp16", bucket_mb=1e-4)))
    model = scaled()
    history = fit(comm, model, Allreduce(compress="fp16"), epochs=EPOCHS)
    done("loss scale", (weights(model), history["loss"], float(model.optimizer.dynamic_scale.numpy())))
    if comm.rank == 0:
        done("alone", {text: _state_names_alone(text) for text in ("topk", "dgc")})
        done("dense", fit(alone(), build(), Allreduce(), epochs=EPOCHS)["loss"])
    return found


def _whole_and_resumed(comm: Communicator, strategy: Allreduce, **options: Any) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    sessions: list[Any] = []
    model = build(**options)
    history = fit(
        comm, model, strategy, epochs=EPOCHS, restore=sessions.append, hooks=[_Saving(saved, model, sessions)]
    )
    again = build(**options)

    def restore(session: Any) -> None:
        state.load_weights(again, saved["weights"])
        state.load_optimizer(again, saved["optimizer"])
        session.load_state(saved["session"])
        session.set_step(HALF)

    fit(comm, again, strategy, epochs=EPOCHS, start=Cursor(0, HALF), restore=restore)
    return {"whole": weights(model), "resumed": weights(again), "loss": history["loss"], "session": saved["session"]}


def _state_names_alone(text: str) -> list[str]:
    sessions: list[Any] = []
    fit(alone(), build(run_eagerly=True), Allreduce(compress=text), epochs=1, restore=sessions.append)
    return sorted(name.rpartition("/")[2] for name in sessions[0].state())


class _Saving:
    """Takes the training state after `HALF` steps, as a checkpoint does."""

    def __init__(self, saved: dict[str, Any], model: Any, sessions: list[Any]) -> None:
        self._saved, self._model, self._sessions = saved, model, sessions

    def steps_until_due(self, cursor: Cursor) -> int | None:
        return HALF - cursor.step if cursor.step < HALF else None

    def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
        if cursor == Cursor(0, HALF):
            assert PLAN.steps_per_epoch > HALF
            self._saved["weights"] = state.weights_of(self._model)
            self._saved["optimizer"] = state.optimizer_of(self._model)
            self._saved["session"] = safetensors.load(safetensors.save(self._sessions[0].state()))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        return
