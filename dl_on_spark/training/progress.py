"""What a person sees while the workers train: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 30.0


class TrainingProgress:
    """Steps done and rows per second. ``quiet`` shows nothing; use it in ``with``."""

    def __init__(self, total_steps: int, steps_per_epoch: int, *, quiet: bool) -> None:
        self._total, self._per_epoch, self._quiet = total_steps, steps_per_epoch, quiet
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        if not self._quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("          {task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting workers", total=self._total, speed="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def steps(self, done: int, rows_per_second: float) -> None:
        """`done` optimizer steps over all epochs."""
        epoch = min(done // self._per_epoch + 1, max(1, self._total // self._per_epoch))
        if self._bar is not None:
            speed = f"{rows_per_second:,.0f} rows/s"
            self._bar.update(self._task, completed=done, description=f"epoch {epoch}", speed=speed)
        elif not self._quiet and time.monotonic() - self._last_line > _LINE_EVERY_S:
            self._last_line = time.monotonic()
            logger.info("step %d of %d, %s rows/s", done, self._total, f"{rows_per_second:,.0f}")

    def epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch's metrics over all rows."""
        if not self._quiet:
            text = ", ".join(f"{name} {value:.4f}" for name, value in logs.items() if isinstance(value, float))
            self.note(f"epoch {epoch + 1}: {text}")

    def note(self, text: str) -> None:
        """A line for the reader."""
        if self._bar is not None:
            self._bar.console.print(f"          {text}", highlight=False)
        elif not self._quiet:
            logger.info("%s", text)
