"""A run with a checkpoint in the middle of an epoch, and the run that begins at that checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.input_pipeline import Cursor
from dl_on_spark.sync import SyncSession, SyncStrategy
from tests.training.worlds import PLAN, fit

STEPS = PLAN.steps_per_epoch
PAUSE = Cursor(1, 3)


class Run(NamedTuple):
    """What a run ended with."""

    model: Any
    session: SyncSession
    history: dict[str, list[float]]


def resumed(comm: Communicator, strategy: SyncStrategy, build: Callable[[], Any]) -> tuple[Run, Run]:
    """The undisturbed run of three epochs, saved at `PAUSE`, and the one that goes on from there."""
    from dl_on_spark.training import state

    saved: dict[str, Any] = {}
    step = PAUSE.epoch * STEPS + PAUSE.step

    class Save:
        def steps_until_due(self, cursor: Cursor) -> int | None:
            return PAUSE.step - cursor.step if cursor.step < PAUSE.step else None

        def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
            if cursor == PAUSE:
                sessions[0].finish_epoch(step)
                saved.update(state.weights_of(calm), **state.optimizer_of(calm))
                saved["session"] = copies(sessions[0])

        def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
            return

    def restore(session: SyncSession) -> None:
        state.load_weights(second, saved)
        state.load_optimizer(second, saved)
        session.load_state(saved["session"])
        session.set_step(step)
        sessions.append(session)

    sessions: list[SyncSession] = []
    calm, second = build(), build()
    first = fit(comm, calm, strategy, epochs=3, hooks=[Save()], restore=sessions.append)
    again = fit(comm, second, strategy, epochs=3, start=PAUSE, restore=restore)
    return Run(calm, sessions[0], first), Run(second, sessions[1], again)


def copies(session: SyncSession) -> dict[str, np.ndarray]:
    """The session's state, as it is now."""
    return {name: value.copy() for name, value in session.state().items()}
