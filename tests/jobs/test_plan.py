"""The plan job and the network benchmark on real workers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dl_on_spark.concurrency import WAYS, Cluster, Link
from dl_on_spark.concurrency.communication import EXCHANGES
from dl_on_spark.concurrency.fit import fit_link, two_parts
from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import ConfigError
from dl_on_spark.jobs import bench_network, plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY = datetime.date(2024, 1, 2)


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    random = np.random.default_rng(0)
    for day in ("2024-01-01", "2024-01-02"):
        folder = tmp_path / "tables" / "features" / f"date={day}"
        folder.mkdir(parents=True)
        x = random.standard_normal(4000).astype(np.float32)
        pq.write_table(pa.table({"x": x, "label": (x > 0).astype(np.float32)}), folder / "0.parquet")
    (tmp_path / "schema.yaml").write_text(
        "name: t\nfields:\n  x: {type: float, role: feature}\n  label: {type: float, role: label}\n"
    )
    return PipelineConfig.model_validate(
        {
            "name": "small",
            "lake": str(tmp_path),
            "schema": str(tmp_path / "schema.yaml"),
            "etl": {"transform": "none:none", "sources": {}},
            "training": {
                "model": "tests.jobs.test_plan:build_model",
                "global_batch_size": 256,
                "days": 1,
                "holdout_days": 1,
                "deadline_s": 120,
            },
        }
    )


def build_model() -> object:
    """Loaded in the workers."""
    import keras

    x = keras.Input((), name="x")
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Reshape((1,))(x))
    model = keras.Model({"x": x}, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile("adam", "binary_crossentropy")
    return model


def test_a_plan_is_measured_on_workers_and_drawn(spark: SparkSession, config: PipelineConfig, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    found = plan.run(spark, config, DAY, workers=[1, 2, 8], batch=[256, 512], output=picture, quiet=True)
    estimates = found["plans"][0]["estimates"]
    assert {e["workers"] for e in estimates} == {1, 2, 8}
    assert {e["way"] for e in estimates} == set(WAYS)
    assert found["measured"]["rows of an epoch"] == "4,000"
    assert found["measured"]["gradient"] == f"{4 * (2 * 8 + 8 + 1)} bytes"  # weights of 1-8-1
    assert found["global_batch_size"] in (256, 512)
    assert all(0 < e["efficiency"] <= 1 for e in estimates)
    assert picture.read_bytes().startswith(b"\x89PNG")
    json.dumps(found)  # a program may read it


def test_a_batch_with_fewer_rows_than_workers_is_refused(spark: SparkSession, config: PipelineConfig) -> None:
    with pytest.raises(ConfigError, match="too small for 512 workers"):
        plan.run(spark, config, DAY, workers=[512], quiet=True)


def test_a_network_profile_replaces_the_assumed_link(tmp_path: Path) -> None:
    cluster = Cluster(1, 1, 1.0, plan.ASSUMED, plan.ASSUMED)
    profile = tmp_path / "network.json"
    profile.write_text('{"between": {"latency_s": 1e-6, "byte_s": 1e-11}}')
    assert plan.with_profile(cluster, profile).between == Link(1e-6, 1e-11)
    assert plan.with_profile(cluster, profile).inside == plan.ASSUMED
    for text in ("no json", "[]", '{"between": {}}', '{"elsewhere": {"latency_s": 1, "byte_s": 1}}'):
        profile.write_text(text)
        with pytest.raises(ConfigError, match="not a network profile"):
            plan.with_profile(cluster, profile)


def test_the_network_is_measured_between_tasks(spark: SparkSession, tmp_path: Path) -> None:
    found = bench_network.measure(spark, 2)
    assert {row["algorithm"] for row in found["exchanges"]} == {"shared_memory"}
    assert [row["bytes"] for row in found["exchanges"]] == sorted(row["bytes"] for row in found["exchanges"])
    assert all(row["seconds"] > 0 and row["model_s"] > 0 for row in found["exchanges"])
    (link,) = found["profile"].values()
    assert link["latency_s"] >= 0
    assert link["byte_s"] > 0


@pytest.mark.parametrize("large", ["ring", "shared_memory"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_fit_finds_the_link_that_made_the_points(world: int, large: str) -> None:
    link = Link(40e-6, 0.8e-9)
    sizes = [4 << 10 << (2 * k) for k in range(7)]
    names = ["recursive_doubling" if large == "ring" and size <= 128 << 10 else large for size in sizes]
    points = [(size, EXCHANGES[name](size, world, link).seconds) for size, name in zip(sizes, names, strict=True)]
    points[3] = (points[3][0], points[3][1] * 3)  # one disturbed point
    found = fit_link(points, world, names)
    assert found.alpha == pytest.approx(link.alpha, rel=0.02)
    assert found.byte_s == pytest.approx(link.byte_s, rel=0.02)


def test_parts_of_a_fit_are_never_negative() -> None:
    assert two_parts([1, 1, 1], [100, 200, 400], [3.0, 2.9, 2.8]) == (pytest.approx(2.9, rel=0.05), 0.0)
    a, b = two_parts([1, 1, 1], [100, 200, 400], [0.1, 0.21, 0.43])
    assert a == 0
    assert b == pytest.approx(0.001, rel=0.1)
