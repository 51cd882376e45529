"""Faults that a worker does to itself, at a moment of its training; the fault matrix's part in the workers.

A fault strikes once in a run, whatever is started again: a mark in the ``control`` folder says that it has.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

FAULTS = ("kill", "stop", "memory", "segfault", "nan", "disk", "truncated", "flipped", "vanished")
MOMENTS = ("start", "middle", "collective", "checkpoint", "epoch end")
FEATURES = ("a", "b")
CHECKPOINT_EVERY = 6
_MARK, _STEPS = "struck", "steps"


@dataclass(frozen=True)
class Fault:
    """What strikes which rank when. ``step``: the first of the middle of an epoch."""

    kind: str
    moment: str
    rank: int
    step: int
    control: str
    run: str
    table: str

    @property
    def struck_at(self) -> float | None:
        """Seconds since the epoch; None before it strikes."""
        mark = Path(self.control, _MARK)
        return float(mark.read_text()) if mark.exists() else None


def first_steps(control: str) -> list[tuple[float, float]]:
    """(training began, its first steps were done) of each time that rank 0 got so far, in order; epoch seconds."""
    path = Path(control, _STEPS)
    pairs = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(began), float(done)) for began, done in pairs]


def build_model():
    """Dropout and batch normalization, whose states differ from rank to rank."""
    import keras

    inputs = {name: keras.Input((), name=name) for name in FEATURES}
    hidden = keras.layers.Concatenate()([keras.layers.Reshape((1,))(tensor) for tensor in inputs.values()])
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(hidden))
    hidden = keras.layers.Dropout(0.3, seed=3)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "binary_crossentropy")
    return model


def callbacks_with(fault: Fault):
    """The callbacks of every rank; they keep nothing on themselves that a checkpoint would save."""

    def callbacks(rank: int):
        import keras

        mine = rank == fault.rank and fault.struck_at is None and bool(fault.kind)
        reached, times = [], []

        class Strike(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                times.append(time.time())
                if mine and fault.moment == "start":
                    _strike(fault, self.model)
                elif mine and fault.moment == "collective":
                    _strike_in_collectives(lambda: bool(reached), lambda: _strike(fault, self.model))
                elif mine and fault.moment == "checkpoint":
                    _strike_in_second_checkpoint(lambda: _strike(fault, self.model))

            def on_train_batch_end(self, batch, logs=None):
                if rank == 0 and len(times) == 1:
                    times.append(time.time())
                    with Path(fault.control, _STEPS).open("a") as file:
                        file.write(f"{times[0]} {times[1]}\n")
                if mine and batch >= fault.step:
                    reached.append(batch)
                    if fault.moment == "middle":
                        _strike(fault, self.model)

            def on_epoch_end(self, epoch, logs=None):
                if mine and fault.moment == "epoch end":
                    _strike(fault, self.model)

        return [Strike()]

    return callbacks


def _strike(fault: Fault, model) -> None:
    if fault.struck_at is not None:
        return
    Path(fault.control, _MARK).write_text(str(time.time()))
    if fault.kind in {"truncated", "flipped"}:
        _damage_last_checkpoint(fault)
    if fault.kind == "vanished":
        first = sorted(Path(fault.table).glob("part-*.parquet"))[0]
        first.rename(first.with_name(f".{first.name}.gone"))
    if fault.kind in {"kill", "truncated", "flipped", "vanished"}:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "segfault":
        ctypes.string_at(0)
    elif fault.kind == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        bytearray(1 << 28)
    elif fault.kind == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    elif fault.kind == "nan":
        weight = model.trainable_weights[0]
        weight.assign(weight * float("nan"))


def _damage_last_checkpoint(fault: Fault) -> None:
    """In the furthest complete checkpoint, if there is one."""
    complete = sorted(Path(fault.run, "checkpoints").glob("*/manifest.json"))
    if complete:
        file = complete[-1].with_name("model.safetensors")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data[: len(data) // 2] if fault.kind == "truncated" else data)


def _strike_in_collectives(due, strike) -> None:
    """In the middle of the next exchange after `due`: the peers have begun it and wait."""
    from dl_on_spark.collectives import Communicator
    from dl_on_spark.collectives.requests import Requests

    next_number, ask = Communicator._next, Requests.ask

    def numbered(self):
        if due():
            strike()
        return next_number(self)

    def asked(self, *arguments):
        if due():
            strike()
        return ask(self, *arguments)

    Communicator._next, Requests.ask = numbered, asked


def _strike_in_second_checkpoint(strike) -> None:
    """After this rank's file of it is there, before it is complete."""
    from dl_on_spark.training.checkpoint import CheckpointStore

    put = CheckpointStore.put

    def put_and_strike(self, step, name, tensors):
        digest = put(self, step, name, tensors)
        if step >= 2 * CHECKPOINT_EVERY:
            strike()
        return digest

    CheckpointStore.put = put_and_strike
