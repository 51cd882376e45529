"""`dl-on-spark checkpoints`: what a run has saved, whether it is whole, and which of it to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from dl_on_spark.errors import CheckpointError, ConfigError
from dl_on_spark.training.checkpoint import CheckpointStore
from dl_on_spark.training.run_folder import RunFolder


@dataclass(frozen=True)
class Saved:
    """One checkpoint's folder. ``problem``: why it cannot be resumed from; None where nothing is wrong."""

    name: str
    step: int
    epoch: int
    workers: int
    bytes: int
    metrics: dict[str, float]
    problem: str | None


def found(run: str, *, verify: bool = False) -> list[Saved]:
    """The checkpoints of the run's folder, furthest first; ``verify``: every file is read against its checksum.

    Raises `ConfigError` where there is no run.
    """
    store = _store(run)
    saved = []
    for name in store.names():
        try:
            manifest = (store.verify(name) if verify else store.open(name)).manifest
        except CheckpointError as error:
            saved.append(Saved(name, 0, 0, 0, 0, {}, error.message))
            continue
        size = sum(file.size for file in manifest.files)
        saved.append(
            Saved(name, manifest.step, manifest.cursor.epoch, manifest.world_size, size, dict(manifest.metrics), None)
        )
    return saved


def prune(run: str, keep: int) -> list[str]:
    """Remove all but the last ``keep`` whole checkpoints, and what earlier attempts left half-written.

    Returns the names of the removed. Raises `ConfigError` where there is no run, or for fewer than one.
    """
    if keep < 1:
        raise ConfigError(f"--keep {keep}: at least one checkpoint must stay.", fix="Give a number from 1.")
    store = _store(run)
    before = store.names(complete=False)
    store.prune(keep, verify=True)
    after = set(store.names(complete=False))
    return [name for name in before if name not in after]


def as_dict(run: str, saved: list[Saved]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {"run": run, "whole": sum(one.problem is None for one in saved), "checkpoints": [vars(one) for one in saved]}


def show(run: str, saved: list[Saved], console: Console, *, verified: bool) -> None:
    """A table, furthest first."""
    grid = Grid(title=run, title_justify="left")
    grid.add_column("checkpoint", no_wrap=True)
    for name in ("step", "epoch", "workers", "MB"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("metrics")
    grid.add_column("state", no_wrap=True)
    for one in saved:
        if one.problem:
            grid.add_row(one.name, "", "", "", "", "", Text("damaged", "bold red"))
            continue
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items())
        size = f"{one.bytes / 1e6:,.1f}"
        state = "verified" if verified else "complete"
        grid.add_row(one.name, f"{one.step:,}", str(one.epoch), str(one.workers), size, metrics, state)
    console.print(grid)
    for problem in (one.problem for one in saved if one.problem):
        console.print(problem, highlight=False)


def _store(run: str) -> CheckpointStore:
    folder = RunFolder(run)
    if folder.record() is None:
        raise ConfigError(
            f"{folder.uri} holds no training run (it has no run.json).",
            fix="Give the run's folder, which the train job names.",
        )
    current = folder.current_attempt()
    # As the current attempt, whose half-written checkpoint stays; it commits nothing.
    return CheckpointStore(folder.uri, 0 if current is None else current.number, lambda: False)
