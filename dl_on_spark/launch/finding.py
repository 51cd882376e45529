"""What a look at the cluster found: good or bad, where, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was seen, where, and what to set."""

    level: Literal["ok", "warning", "error"]
    what: str
    where: str
    fix: str = ""
