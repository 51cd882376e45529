"""pipeline.yaml: one file that says where the data lies, how to train on it and what to publish.

Paths: `schema` files are relative to the folder of the pipeline.yaml; data paths are relative to
`lake`, and `lake` itself to the current folder (or any URI that pyarrow.fs reads). `--set a.b=value`
overrides one entry; the value is read as YAML.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dl_on_spark.errors import ConfigError
from dl_on_spark.yaml_text import load_yaml

_MEMORY = r"^[1-9][0-9]*[kmgtKMGT]$"
_MASK = "********"
# Names whose values Spark itself hides, and those of the stores' access keys.
_SECRET = re.compile(r"(?i)secret|password|passwd|token|credential|access[._]?key|account[._]?key")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # s3://key:secret@bucket
_WHOLE = 2**31 - 1  # what fits a signed 32-bit integer: no count here is more
Count = Annotated[int, Field(gt=0, le=_WHOLE)]
# Each metric of an evaluation, and where it is better.
_BETTER: dict[str, Literal["max", "min"]] = {
    "auc": "max",
    "accuracy": "max",
    "log_loss": "min",
    "mean_squared_error": "min",
    "mean_absolute_error": "min",
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value: Any) -> Any:
        """No entry is a truth value, though Python counts true as 1; no path or name holds a zero byte."""
        if isinstance(value, bool):
            raise ValueError(f"{str(value).lower()} is no value here")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("the text holds a zero byte")
        return value


class SourceConfig(_Section):
    """One raw table that the ETL reads."""

    path: str
    format: Literal["csv", "json", "parquet"] = "csv"
    source_schema: str | None = Field(default=None, alias="schema")
    partition: str | None = Field(
        default=None,
        description="hive partition column (one folder a day) that limits the read to the days asked for",
    )
    lookback_days: int = Field(
        default=0, ge=0, le=36_500, description="days before the first day that the transform needs"
    )


class EtlConfig(_Section):
    """Raw sources → transform → checks → a table partitioned by date."""

    transform: str = Field(description="module:function(spark, sources, first_day, last_day) -> DataFrame")
    sources: dict[str, SourceConfig]
    table: str = "tables/features"
    quarantine: str = "tables/quarantine"
    max_rejected: float = Field(default=0.05, ge=0, le=1, description="fail when more than this share is rejected")
    rows_per_file: Count = 1_000_000


class TrainingConfig(_Section):
    """What is trained, on which days, by how many workers, synchronized how."""

    model: str = Field(description="module:function([schema]) -> compiled keras.Model")
    sync: str = "allreduce"
    num_workers: Count = 2
    gpus_per_worker: int = Field(default=0, ge=0, le=_WHOLE)
    cpus_per_worker: Count | None = None
    global_batch_size: Count = Field(default=4096, description="rows per optimizer step over all workers")
    epochs: Count = 3
    seed: int = Field(default=7, ge=0, lt=2**32)
    class_weight: dict[int, float] | None = Field(default=None, description="weight of a row by its label's class")
    days: Count = Field(default=90, description="days trained on, before the held-out ones")
    holdout_days: Count = Field(default=7, description="last days up to --date: validation and gate, never trained on")
    where: str | None = None
    checkpoint_dir: str = "checkpoints"
    checkpoint_every: Count | None = Field(default=None, description="steps; epoch ends always")
    max_restarts: int = Field(default=3, ge=0, le=_WHOLE)
    deadline_s: float = Field(default=600, gt=0)


class GateConfig(_Section):
    """What a candidate must reach to be published."""

    metric: Literal["auc", "accuracy", "log_loss", "mean_squared_error", "mean_absolute_error"] = "auc"
    direction: Literal["max", "min"] = Field(
        default_factory=lambda given: _BETTER.get(given.get("metric", ""), "max"), description="where it is better"
    )
    floor: float | None = Field(default=None, description="absolute value that the metric must reach")
    min_gain_over_baseline: float = Field(default=0.0, description="margin over the constant-rate baseline")
    tolerance: float = Field(default=0.0, ge=0, description="how much worse than the current model is still accepted")
    compare: Literal["difference", "lower_bound"] = Field(
        default="difference",
        description="what must not be below -tolerance: the measured difference, or the lower end of its interval",
    )
    confidence: float = Field(default=0.95, ge=0.5, lt=1, description="of the interval of the difference")
    slices: tuple[str, ...] = Field(default=(), description="columns whose values are compared each for itself")
    max_slice_loss: float = Field(
        default=0.02, ge=0, description="how much worse a slice may get; a loss that may be chance is none"
    )
    min_slice_rows: Count = Field(default=200, description="smaller slices are left out")
    max_calibration_error: float | None = Field(default=None, ge=0, description="expected calibration error")
    max_drift: float | None = Field(
        default=None, ge=0, description="population stability index of a feature against the training rows"
    )

    @model_validator(mode="after")
    def _prefers_the_better(self) -> Self:
        """The other direction would let the worse model pass and refuse the better one."""
        if self.direction != _BETTER[self.metric]:
            raise ValueError(f"direction: {self.metric} is better at its {_BETTER[self.metric]}, not {self.direction}")
        return self


class ScoringConfig(_Section):
    """Where scores go."""

    table: str = "tables/scores"
    batch_size: Count = 8192


class ClusterConfig(_Section):
    """Where `dl-on-spark submit` and the DAGs send the jobs, and how large; other Spark settings stand in `spark`."""

    master: str | None = Field(
        default=None,
        pattern=r"^(yarn|local(\[[0-9*]+(,[0-9]+)?\])?|spark://.+|k8s://.+)$",
        description="yarn, k8s://https://..., spark://... or local[n]; the DAGs take Airflow's connection without it",
    )
    deploy_mode: Literal["client", "cluster"] = Field(default="client", description="where the driver runs")
    executors: Count | None = Field(default=None, description="default: training.num_workers")
    executor_cores: Count = 1
    executor_memory: str | None = Field(default=None, pattern=_MEMORY)
    driver_memory: str | None = Field(default=None, pattern=_MEMORY)
    gpu_discovery_script: str | None = Field(default=None, description="prints an executor's GPUs, as Spark defines it")
    python: str | None = Field(default=None, description="interpreter of the executors, and of a driver on the cluster")
    driver_python: str | None = Field(default=None, description="interpreter of a driver that is not on the cluster")
    archives: tuple[str, ...] = Field(default=(), description="unpacked beside each executor: environment.tar.gz#name")
    py_files: tuple[str, ...] = Field(default=("dist/dl_on_spark.zip",), description="code; see dl-on-spark package")
    jobs: str = Field(default="jobs", description="folder or URI of the entry points, train.py and so on")
    properties_file: str | None = Field(
        default=None, description="Spark settings that must not be on a command line; replaces spark-defaults.conf"
    )

    @model_validator(mode="after")
    def _reaches_the_cluster(self) -> Self:
        """A local master has no executors of its own, and no cluster that a driver could run on."""
        if self.deploy_mode == "cluster" and (self.master or "").startswith("local"):
            raise ValueError(f"deploy_mode: a driver cannot run on a cluster with master {self.master}")
        return self


class PipelineConfig(_Section):
    """The whole pipeline.yaml."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    lake: str = "lake"
    feature_schema: str = Field(alias="schema", description="schemas/*.yaml of the feature table")
    date_column: str = "date"
    etl: EtlConfig
    training: TrainingConfig
    gate: GateConfig = GateConfig()
    registry: str = "models"
    keep_versions: Count | None = Field(
        default=None, description="published versions that stay, beside the current and the previous one; default: all"
    )
    scoring: ScoringConfig = ScoringConfig()
    cluster: ClusterConfig = ClusterConfig()
    spark: dict[str, str] = Field(default_factory=dict, description="Spark settings, by Spark's own names")
    airflow: dict[str, Any] = Field(default_factory=dict, description="read, and checked, by airflow_dags/ alone")

    base_dir: str = Field(default=".", exclude=True, description="folder of the pipeline.yaml; set by load_config")

    @field_validator("spark", mode="before")
    @classmethod
    def _settings_are_strings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: str(v).lower() if isinstance(v, bool) else str(v) for key, v in value.items()}

    @model_validator(mode="after")
    def _each_folder_has_one_owner(self) -> Self:
        """A job replaces days of its own table: it must not be what another one reads or writes."""
        written = {
            "etl.table": self.etl.table,
            "etl.quarantine": self.etl.quarantine,
            "training.checkpoint_dir": self.training.checkpoint_dir,
            "registry": self.registry,
            "scoring.table": self.scoring.table,
        }
        sources = {f"etl.sources.{name}.path": source.path for name, source in self.etl.sources.items()}
        folders = {entry: _normal(self.data_path(path)) for entry, path in {**written, **sources}.items()}
        for (entry, folder), (other, below) in itertools.permutations(folders.items(), 2):
            if below.startswith(folder) and (entry in written or other in written):
                raise ValueError(f"{entry} and {other} share the folder {folder}; give each its own")
        return self

    def data_path(self, path: str) -> str:
        """`path` under `lake`, unless it is absolute or a URI."""
        if "://" in path or path.startswith("/"):
            return path
        if path.startswith("~"):
            return str(Path(path).expanduser())
        lake = self.lake if "://" in self.lake else str(Path(self.lake).expanduser().absolute())
        return f"{lake.rstrip('/')}/{path}"

    def without_secrets(self) -> dict[str, Any]:
        """All entries as plain values; what may be a secret is masked, since this is kept and printed."""
        masked: dict[str, Any] = _masked(self.model_dump(mode="json", by_alias=True))
        return masked

    def schema_path(self, path: str | None = None) -> Path:
        """The feature schema's file, or another schema file named in the configuration."""
        given = Path(path or self.feature_schema)
        return given if given.is_absolute() else Path(self.base_dir) / given


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read and validate a pipeline.yaml with `key.sub=value` overrides.

    Raises ConfigError naming the file, the entry and the nearest valid name.
    """
    file = Path(path)
    try:
        data = load_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file.", fix="Give the pipeline.yaml with --config.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}).", fix="Check the path and its permissions.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}", fix="Mend the line named above.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: holds no entries.", fix="Start from examples/flight_delay/pipeline.yaml.")
    for override in overrides:
        _apply_override(data, override)
    try:
        config = PipelineConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{file}: {_explain(error)}", fix="Mend the entries named above.") from error
    return config.model_copy(update={"base_dir": str(file.parent)})


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r} is not key=value.", fix="For example --set training.epochs=5.")
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}", fix="Quote it.") from error
    *parents, last = key.strip().split(".")
    section = data
    for depth, name in enumerate(parents):
        section = section.setdefault(name, {})
        if isinstance(section, dict) and name == "spark" and depth == 0:
            last = ".".join([*parents[1:], last])  # Spark's own keys hold dots: spark.spark.sql.ansi.enabled=true
            break
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override!r}: {name} is not a section.", fix="Name an entry inside a section.")
    section[last] = value


def _masked(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _masked(inner, key) for key, inner in value.items()}
    if isinstance(value, str):
        return _MASK if _SECRET.search(name) else _CREDENTIALS.sub(f"{_MASK}@", value)
    return value


def _normal(folder: str) -> str:
    """The folder with a slash at its end; one way of writing it on a local disk."""
    return f"{(folder if '://' in folder else os.path.normpath(folder)).rstrip('/')}/"


def _explain(error: ValidationError) -> str:
    """Each finding as `entry: what is wrong`, with a did-you-mean for unknown names."""
    findings = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = _names_in(PipelineConfig, [str(part) for part in item["loc"][:-1]])
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            text = f"unknown entry; did you mean {near[0]!r}?" if near else f"unknown entry; known: {', '.join(known)}"
        findings.append(f"{place}: {text}" if place else text)
    return "; ".join(findings).rstrip(".?") + "."


def _names_in(model: type[BaseModel], place: Sequence[str]) -> list[str]:
    """The entry names of the section at `place`."""
    for name in place:
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        found = fields.get(name)
        if found is None:
            continue  # a key inside a mapping, as the name of a source
        for candidate in (found.annotation, *getattr(found.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
    return sorted((field.alias or key) for key, field in model.model_fields.items() if key != "base_dir")
