"""The publication job: the gate, then a new version."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import dl_on_spark
from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import GateRefused, InputError
from dl_on_spark.jobs.days import run_folder
from dl_on_spark.jobs.evaluate import METRICS, held_out, judged_again, registry_of
from dl_on_spark.lake import storage
from dl_on_spark.registry import Judgement, SavedModel, decide
from dl_on_spark.registry.judgement import PROFILE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    spark: SparkSession,
    config: PipelineConfig,
    date: datetime.date,
    *,
    run_name: str | None = None,
    force_reason: str | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Publish the run's model if the gate lets it pass; raises `GateRefused` with the reasons otherwise."""
    folder = run_folder(config, date, run_name)
    candidate = SavedModel.load(folder)
    try:
        judged = Judgement.from_json(storage.read_bytes(storage.join(folder, METRICS)))
    except FileNotFoundError as error:
        raise InputError(f"{folder} was not evaluated.", fix="Run the evaluate job first.") from error
    if judged.metrics.model != candidate.digest:
        raise InputError(
            f"{folder} was trained again after its evaluation: {METRICS} is of another model.",
            fix="Run the evaluate job again.",
        )
    registry = registry_of(config)
    registry.check_writable()
    current = registry.current()
    other = None if current is None else current.lineage["model_sha256"]
    if other not in (None, candidate.digest):
        if held_out(config, date).snapshot(spark).fingerprint != judged.metrics.snapshot:
            raise InputError(
                f"the held-out rows of {folder} changed after its evaluation: it would be compared on other rows.",
                fix="Run the evaluate job again.",
            )
        if not judged.comparison.answers(config.gate, other):  # another version, or other questions, since then
            judged = judged_again(spark, config, date, candidate, current, quiet=quiet)
    decision = decide(judged, config.gate)
    if not decision.passed and force_reason is None:
        raise GateRefused(
            f"the gate refuses {folder}: {'; '.join(decision.failures)}.",
            fix="The current model stays. Publish all the same with --force 'reason', which is recorded.",
        )
    names = ["model.keras", "schema.yaml", "statistics.json", METRICS]
    names += [PROFILE] if storage.exists(storage.join(folder, PROFILE)) else []
    files = {name: storage.read_bytes(storage.join(folder, name)) for name in names}
    lineage = {
        "model_sha256": candidate.digest,
        "run": folder,
        "date": date.isoformat(),
        "published": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "trained_on": candidate.statistics.fingerprint,
        "judged_on": judged.metrics.snapshot,
        "judged_against": judged.comparison.version,
        "code_version": dl_on_spark.__version__,
        "code": _code(config.training.model),
        "seed": config.training.seed,
        "config": config.without_secrets(),
        "gate": list(decision.reasons),
        "checks": [asdict(check) for check in decision.checks],
        "forced": force_reason if not decision.passed else None,
    }
    version = registry.publish(files, lineage, instead_of=None if current is None else current.number)
    removed = [] if config.keep_versions is None else registry.retain(config.keep_versions)
    return {
        "version": version.number,
        "folder": version.folder,
        "previous": None if current is None else current.number,
        "gate": "; ".join(decision.reasons),
        "forced": lineage["forced"],
        "removed": removed,
    }


def _code(model: str) -> dict[str, str | None]:
    """The model function, the SHA-256 of its source file, and the versions of what ran it."""
    module, _, _ = model.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # published from a place that does not hold the model's code
        found = None
    source = None
    if found is not None and found.origin is not None and found.loader is not None:
        with contextlib.suppress(OSError, AttributeError):  # AttributeError: a loader without data, as of C modules
            source = hashlib.sha256(found.loader.get_data(found.origin)).hexdigest()  # type: ignore[attr-defined]
    versions = {name: importlib.metadata.version(name) for name in ("pyspark", "tensorflow", "keras", "numpy")}
    return {"model": model, "source_sha256": source, **versions}
