"""`dl-on-spark models`: what is published, from what, how two versions differ, and which one is current."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import InputError
from dl_on_spark.jobs.evaluate import METRICS, registry_of
from dl_on_spark.lake import storage
from dl_on_spark.registry import Version

_STYLES = {"current": "bold green", "withdrawn": "red"}
# Differ between any two versions and say nothing of why.
_TOLD_APART = ("metrics.calibration", "metrics.comparison", "metrics.drift", "lineage.checks", "lineage.gate")


def listed(config: PipelineConfig) -> list[dict[str, Any]]:
    """Each version, newest first: number, stage, day, gate's metric, when it last became current and by whom."""
    registry = registry_of(config)
    stages, versions = registry.stages(), registry.versions()
    known = [version.number for version in versions]
    last = {event["version"]: event for event in stages.history}
    return [
        {
            "version": version.number,
            "stage": stages.stage(version.number, known),
            "date": version.lineage.get("date"),
            config.gate.metric: _metrics(version).get(config.gate.metric),
            "current_since": last.get(version.number, {}).get("at"),
            "by": last.get(version.number, {}).get("by"),
            "forced": version.lineage.get("forced"),
        }
        for version in reversed(versions)
    ]


def shown(config: PipelineConfig, number: int | None) -> dict[str, Any]:
    """A version (default: the current one) with its stage, lineage, metrics and what happened to it."""
    registry = registry_of(config)
    stages = registry.stages()
    wanted = stages.current if number is None else number
    if wanted is None:
        raise InputError(f"model {config.name!r} has no version yet.", fix="Publish one first.")
    version = registry.version(wanted)
    return {
        "version": version.number,
        "stage": stages.stage(version.number, registry.numbers()),
        "folder": version.folder,
        "lineage": version.lineage,
        "metrics": _metrics(version),
        "history": [event for event in stages.history if event["version"] == version.number],
    }


def difference(config: PipelineConfig, first: int, second: int) -> dict[str, list[Any]]:
    """Each entry of lineage, configuration and metrics in which two versions differ: [of the first, of the second]."""
    registry = registry_of(config)
    a, b = (
        dict(_flat({"lineage": version.lineage, "metrics": _metrics(version)}))
        for version in (registry.version(first), registry.version(second))
    )
    return {
        name: [a.get(name), b.get(name)]
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name) and not name.startswith(_TOLD_APART)
    }


def moved(config: PipelineConfig, version: int | None, reason: str | None) -> dict[str, Any]:
    """Make a version (default: the one before, see `Stages.back_to`) current."""
    registry = registry_of(config)
    before = registry.stages().current
    found = registry.roll_back(version, reason=reason)
    return {"version": found.number, "instead_of": before, "folder": found.folder}


def show_list(rows: list[dict[str, Any]], console: Console) -> None:
    """A table, newest first."""
    if not rows:
        console.print("No version is published yet.")
        return
    grid = Grid()
    for name in rows[0]:
        grid.add_column(name.replace("_", " "), justify="right" if name == "version" else "left")
    for row in rows:
        cells = [f"{v:.4f}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()]
        grid.add_row(*(Text(cell) for cell in cells), style=_STYLES.get(row["stage"]))
    console.print(grid)


def show_difference(found: dict[str, list[Any]], first: int, second: int, console: Console) -> None:
    """A table, an entry a line."""
    grid = Grid()
    for name in ("entry", f"version {first}", f"version {second}"):
        grid.add_column(name, overflow="fold")
    for name, values in found.items():
        grid.add_row(name, *(Text("" if value is None else str(value)) for value in values))
    console.print(grid)


def _metrics(version: Version) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(storage.read_bytes(storage.join(version.folder, METRICS)))
    except (FileNotFoundError, ValueError):  # of an earlier release, or damaged: the list must not fail over it
        return {}
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
