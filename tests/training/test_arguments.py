"""Arguments of `Trainer` and `fit`: each wrong one is named before Spark is asked for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dl_on_spark import Schema, Trainer, open_table
from dl_on_spark.errors import ConfigError

SCHEMA = Schema.from_yaml("{name: t, fields: {a: {type: float, role: feature}}}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", "3"),
        ("global_batch_size", 512.5),
        ("seed", None),
        ("steps_per_execution", 0),
        ("validation", 1.5),
        ("validation", "half"),
        ("callbacks", []),
        ("resume", "sometimes"),
        ("schema", None),
        ("table", "a/path"),
        ("num_workers", "2"),
        ("num_workers", True),
        ("max_restarts", -1),
        ("gpus_per_worker", -1),
        ("cpus_per_worker", 0),
        ("checkpoint_every", 0),
        ("deadline_s", 0),
        ("deadline_s", "1m"),
        ("model", None),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_made(tmp_path: Path, name: str, value: Any) -> None:
    trainer: dict[str, Any] = {"model": "m:f", "checkpoint_dir": str(tmp_path / "run")}
    fit: dict[str, Any] = {"table": open_table(tmp_path / "nowhere"), "schema": SCHEMA}
    (trainer if name in Trainer.__dataclass_fields__ else fit)[name] = value
    with pytest.raises(ConfigError, match=name) as caught:
        Trainer(**trainer).fit(None, fit.pop("table"), **fit)  # type: ignore[arg-type]
    assert caught.value.fix
    assert not list(tmp_path.iterdir())
