"""All that the gate looks at: metrics, the comparison with the current model, and drift of the inputs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dl_on_spark.config import GateConfig
from dl_on_spark.errors import ConfigError, InputError, TableError
from dl_on_spark.lake import Snapshot, Table, storage
from dl_on_spark.launch.barrier import input_error
from dl_on_spark.registry.comparison import Comparison, compare, is_sliceable
from dl_on_spark.registry.drift import Profile, drift, profile_of
from dl_on_spark.registry.evaluate import evaluate
from dl_on_spark.registry.metrics import Metrics, refused_as_damaged
from dl_on_spark.registry.predictions import SavedModel
from dl_on_spark.registry.sample import sample, scored_sample
from dl_on_spark.registry.versions import Version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

PROFILE = "profile.json"


@dataclass(frozen=True)
class Judgement:
    """``drift``: population stability index by feature; empty where the training rows are not known."""

    metrics: Metrics
    comparison: Comparison
    drift: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The metrics' entries, then ``comparison`` and ``drift``."""
        return {**asdict(self.metrics), "comparison": asdict(self.comparison), "drift": self.drift}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Judgement:
        """What `to_json` wrote. Raises `InputError` for any other text."""
        with refused_as_damaged():
            data = json.loads(text)
            comparison, shifts = Comparison.from_dict(data.pop("comparison")), dict(data.pop("drift"))
            return cls(Metrics.from_dict(data), comparison, shifts)


def judge(
    spark: SparkSession, candidate: SavedModel, current: Version | None, held_out: Table, gate: GateConfig
) -> Judgement:
    """Measure `candidate` on the held-out rows, beside the `current` version unless that is the same model.

    Metrics are of all rows; intervals, slices and drift of at most 100,000 of them (`sample.SAMPLE_ROWS`). The
    profile of the training rows is made once and kept in the candidate's folder.
    """
    metrics = evaluate(spark, candidate, held_out)
    snapshot, label = held_out.snapshot(spark), candidate.schema.labels[0].name
    _check_slices(snapshot, gate.slices)
    features = [one.name for one in candidate.schema.features]
    columns = list(dict.fromkeys([label, *gate.slices, *features]))
    rows, scores = scored_sample(spark, candidate, snapshot, columns)
    profile = _profile(spark, candidate, features)
    shifts = {} if profile is None else drift(profile, rows)
    if current is None or current.lineage["model_sha256"] == candidate.digest:
        return Judgement(metrics, compare(rows, scores, None, label, gate), shifts)
    before = SavedModel.load(current.folder)
    theirs = evaluate(spark, before, held_out)
    same_rows, old_scores = scored_sample(spark, before, snapshot, columns)
    if theirs.snapshot != metrics.snapshot or not same_rows.equals(rows):
        raise InputError(
            f"the held-out rows of {snapshot.uri} changed while the models were compared.",
            fix="Run the evaluate job again.",
        )
    comparison = replace(
        compare(rows, scores, old_scores, label, gate),
        current=before.digest,
        version=current.number,
        before=getattr(theirs, gate.metric),
    )
    return Judgement(metrics, comparison, shifts)


def _check_slices(snapshot: Snapshot, names: Sequence[str]) -> None:
    for name in names:
        if name not in snapshot.schema.names:
            raise ConfigError(
                f"gate.slices: {snapshot.uri} has no column {name!r}.",
                fix=f"Its columns: {', '.join(snapshot.schema.names)}.",
            )
        if not is_sliceable(snapshot.schema.field(name).type):
            raise ConfigError(
                f"gate.slices: column {name!r} holds {snapshot.schema.field(name).type}, whose values name no slice.",
                fix="Name columns of text, whole numbers or dates.",
            )


def _profile(spark: SparkSession, model: SavedModel, features: Sequence[str]) -> Profile | None:
    """The profile in the model's folder, made where it is not there or of an earlier training."""
    fingerprint, file = model.statistics.fingerprint, storage.join(model.folder, PROFILE)
    found = _read(file)
    if found is not None and Profile.from_json(found).fingerprint == fingerprint:
        return Profile.from_json(found)
    pinned = _read(storage.join(model.folder, "snapshot.json"))
    snapshot = None if pinned is None else Snapshot.from_json(pinned.decode())
    if snapshot is None or snapshot.fingerprint != fingerprint:
        return None
    try:
        made = profile_of(sample(spark, snapshot, features), features, fingerprint)
    except Exception as error:  # Spark wraps what its tasks raise
        cause = input_error(error)
        if not isinstance(cause, TableError):
            raise
        logger.warning("Drift is not known, since the training rows can no longer be read: %s", cause.message)
        return None
    storage.write_bytes(file, made.to_json().encode())
    return made


def _read(file: str) -> bytes | None:
    try:
        return storage.read_bytes(file)
    except FileNotFoundError:
        return None
