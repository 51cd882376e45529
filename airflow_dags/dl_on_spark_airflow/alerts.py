"""What happens when a task fails for good, or the gate refuses."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def alert(on_failure: str | None) -> Callable[[Any], None]:
    """A callback that writes one line of facts, and calls `on_failure` (``module:function``) where given."""

    def call(context: Any) -> None:
        task = context["ti"]
        log.error(
            "ALERT dag=%s task=%s run=%s try=%s: %s",
            task.dag_id,
            task.task_id,
            task.run_id,
            task.try_number,
            context.get("exception") or "no exception",
        )
        if on_failure:
            module, _, function = on_failure.partition(":")
            getattr(importlib.import_module(module), function)(context)

    return call
