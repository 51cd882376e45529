"""The flights example on real days: raw files as the source has them, and no feature that knows the future."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from dl_on_spark.lake import Schema
from dl_on_spark.lake.checks import good_rows, with_reasons
from dl_on_spark.lake.sources import Source, read_source
from examples.flight_delay.raw import lay_down
from examples.flight_delay.transform import flight_features
from tests.cluster import REPOSITORY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST, LAST = datetime.date(2013, 6, 23), datetime.date(2013, 6, 24)
SCHEMAS = REPOSITORY / "schemas"
# What is known only once the flight has left or arrived; `arr_delay` serves the label alone.
AFTERWARDS = ("dep_time", "dep_delay", "arr_time", "air_time")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    lay_down(str(folder), first=FIRST - datetime.timedelta(days=1), last=LAST)
    return folder


@pytest.fixture(scope="module")
def sources(spark: SparkSession, raw: Path) -> dict[str, DataFrame]:
    found = {}
    for name, partition in (("flights", "date"), ("weather", "date"), ("planes", None)):
        source = Source(name, str(raw / name), partition=partition, lookback_days=1 if name == "weather" else 0)
        rows = read_source(spark, source, FIRST, LAST).drop("source_file")
        found[name] = good_rows(with_reasons(rows, Schema.load(SCHEMAS / f"{name}.yaml"), text=True)).cache()
    return found


def features(spark: SparkSession, sources: dict[str, DataFrame]) -> pd.DataFrame:
    found = flight_features(spark, sources, FIRST, LAST).toPandas()
    return found.sort_values(["date", "flight_id"], ignore_index=True)


def test_raw_files_hold_the_days_asked_for_as_text(raw: Path) -> None:
    days = [FIRST - datetime.timedelta(days=1), FIRST, LAST]
    for name in ("flights", "weather"):
        assert sorted(path.name for path in (raw / name).iterdir()) == [f"date={day}" for day in days]
    flights = pd.read_csv(raw / "flights" / f"date={FIRST}" / "flights.csv", dtype=str, keep_default_na=False)
    assert len(flights) == 923
    assert "date" not in flights.columns
    assert "NA" not in set(flights["dep_time"]) and "" in set(flights["dep_time"])
    assert len(pd.read_csv(raw / "planes" / "planes.csv")) == 3_322


def test_the_transform_gives_each_flight_that_arrived_once(spark: SparkSession, sources, raw: Path) -> None:
    found = features(spark, sources)
    assert not found.duplicated(["date", "flight_id"]).any()
    arrived = sources["flights"].where("arr_delay is not null").toPandas()
    assert len(found) == len(arrived) > 1_500
    assert found["delayed"].sum() == (arrived["arr_delay"] > 15).sum()
    assert found["temperature"].notna().mean() > 0.95  # the join with the hour before finds its weather
    schema = Schema.load(SCHEMAS / "flight_features.yaml")
    assert set(found.columns) == {field.name for field in schema.fields}


def test_no_feature_knows_what_happened_after_the_schedule(spark: SparkSession, sources) -> None:
    from pyspark.sql import functions as F

    known = features(spark, sources)
    flights = sources["flights"]
    nulled = flights.withColumns({name: F.lit(None).cast(flights.schema[name].dataType) for name in AFTERWARDS})
    # Each column's values dealt to other flights, as a shuffled column of pandas.
    shuffled = flights.toPandas()
    for seed, name in enumerate(AFTERWARDS):
        shuffled[name] = shuffled[name].sample(frac=1, random_state=seed).to_numpy()
    permuted = spark.createDataFrame(shuffled.astype(object).where(shuffled.notna(), None), flights.schema)
    turned = flights.withColumn("arr_delay", -F.col("arr_delay"))
    for changed in (nulled, permuted):
        pd.testing.assert_frame_equal(features(spark, {**sources, "flights": changed}), known)
    other_label = features(spark, {**sources, "flights": turned})
    pd.testing.assert_frame_equal(other_label.drop(columns="delayed"), known.drop(columns="delayed"))
    assert not other_label["delayed"].equals(known["delayed"])


def test_weather_of_the_scheduled_hour_and_later_is_not_used(spark: SparkSession, sources) -> None:
    from pyspark.sql import functions as F

    noon = F.lit(datetime.datetime(2013, 6, 24, 16))  # 12:00 in New York
    storm = {
        name: F.when(F.col("time_hour") >= noon, 0.0).otherwise(F.col(name))
        for name in ("temp", "humid", "visib", "pressure")
    }
    known = features(spark, sources)
    changed = features(spark, {**sources, "weather": sources["weather"].withColumns(storm)})
    before = (known["date"] == FIRST) | (known["sched_hour"] <= 12)
    pd.testing.assert_frame_equal(changed[before], known[before])
    assert not changed[~before].equals(known[~before])
