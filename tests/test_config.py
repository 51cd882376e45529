"""pipeline.yaml is read, overridden and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dl_on_spark.config import load_config
from dl_on_spark.errors import ConfigError

PIPELINE = Path(__file__).parents[1] / "examples" / "flight_delay" / "pipeline.yaml"


def test_the_demo_pipeline_is_valid_and_resolves_its_paths(tmp_path: Path) -> None:
    config = load_config(PIPELINE, [f"lake={tmp_path}"])
    assert config.data_path("raw/flights") == f"{tmp_path}/raw/flights"
    assert config.data_path("s3://bucket/x") == "s3://bucket/x"
    assert config.schema_path().resolve() == (PIPELINE.parents[2] / "schemas" / "flight_features.yaml").resolve()


def test_overrides_are_read_as_yaml_and_reach_nested_sections() -> None:
    config = load_config(PIPELINE, ["training.epochs=5", "gate.floor=null", "spark.spark.sql.shuffle.partitions=4"])
    assert config.training.epochs == 5
    assert config.gate.floor is None
    assert config.spark == {"spark.sql.shuffle.partitions": "4"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.epoch=5", "did you mean 'epochs'"),
        ("etl.sources.flights.pth=x", "did you mean 'path'"),
        ("trainig.epochs=5", "did you mean 'training'"),
        ("training.epochs=0", "training.epochs: Input should be greater than 0"),
        ("training.num_workers=two", "training.num_workers"),
        ("epochs", "is not key=value"),
        ("name.x=1", "name is not a section"),
        ("training.epochs=[", "not YAML"),
        ("training.epochs=true", "training.epochs: true is no value here"),
        ("training.seed=4294967296", "training.seed: Input should be less than 4294967296"),
        ("training.num_workers=1e30", "training.num_workers"),
        ("etl.sources.weather.lookback_days=1000000", "etl.sources.weather.lookback_days"),
        ('lake="a\\0b"', "lake: the text holds a zero byte"),
        ("gate.floor=.nan", "gate.floor: Input should be a finite number"),
        ("gate.metric=aucc", "gate.metric: Input should be 'auc'"),
        ("gate={metric: log_loss, direction: max}", "log_loss is better at its min, not max"),
        ("spark=", "spark: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_entry_is_named_with_the_nearest_right_one(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        load_config(PIPELINE, [override])


def test_a_missing_a_broken_and_an_empty_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(broken)
    broken.write_text("")
    with pytest.raises(ConfigError, match="holds no entries"):
        load_config(broken)


def test_an_entry_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text(PIPELINE.read_text().replace("  epochs: 3", "  epochs: 3\n  epochs: 30"))
    with pytest.raises(ConfigError, match="the entry 'epochs' is there twice"):
        load_config(twice)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scoring.table=tables/flight_features", "etl.table and scoring.table share the folder"),
        ("etl.table=raw/flights", "etl.table and etl.sources.flights.path share the folder"),
        ("etl.table=raw", "etl.table and etl.sources.flights.path share the folder"),
        ("etl.quarantine=tables/flight_features/rejected", "etl.table and etl.quarantine share the folder"),
        ("etl.table=tables/../raw/./flights", "etl.table and etl.sources.flights.path share the folder"),
        ("etl.table=.", "etl.table and etl.quarantine share the folder"),
        ("etl.table=raw/flights/features", "etl.sources.flights.path and etl.table share the folder"),
    ],
)
def test_a_table_that_another_entry_reads_or_writes_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(PIPELINE, [override])
    load_config(PIPELINE, ["scoring.table=tables/flight_features_scored"])


def test_a_section_without_entries_cannot_be_overridden_inside(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(PIPELINE.read_text() + "spark:\n")
    with pytest.raises(ConfigError, match="spark is not a section"):
        load_config(file, ["spark.spark.sql.shuffle.partitions=4"])


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(PIPELINE, ["lake=~/lake", "registry=~/models"])
    assert config.data_path("raw") == f"{tmp_path}/lake/raw"
    assert config.data_path(config.registry) == f"{tmp_path}/models"


def test_what_may_be_a_secret_is_masked_before_it_is_kept() -> None:
    secrets = ("spark.spark.hadoop.fs.s3a.secret.key=abc", "spark.spark.hadoop.fs.s3a.access.key=abc")
    plain = load_config(PIPELINE, [*secrets, "spark.spark.sql.ansi.enabled=true", "registry=s3://key:abc@bucket/m"])
    shown = plain.without_secrets()
    assert "abc" not in str(shown) and shown["registry"] == "s3://********@bucket/m"
    assert shown["spark"]["spark.sql.ansi.enabled"] == "true"
