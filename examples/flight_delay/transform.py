"""Flights, weather and planes become one row a flight, with what is known before departure."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def flight_features(
    spark: SparkSession, sources: dict[str, DataFrame], first_day: datetime.date, last_day: datetime.date
) -> DataFrame:
    """Features and label of the flights of `first_day` to `last_day`.

    Known before departure: schedule, route, carrier, plane, and the weather observed at the origin one
    hour before the scheduled hour. Departure and arrival times and delays serve the label alone.
    Flights without an arrival (cancelled or diverted) have no label and are left out.
    """
    from pyspark.sql import functions as F

    flights = sources["flights"].where(F.col("date").between(F.lit(first_day), F.lit(last_day)))
    weather = sources["weather"].select(
        "origin",
        (F.col("time_hour") + F.expr("interval 1 hour")).alias("time_hour"),
        "temp",
        "humid",
        "wind_speed",
        "precip",
        "visib",
        "pressure",
    )
    planes = sources["planes"].select("tailnum", F.col("year").alias("built"), "seats")
    joined = flights.join(F.broadcast(weather), ["origin", "time_hour"], "left").join(
        F.broadcast(planes), "tailnum", "left"
    )
    return joined.where(F.col("arr_delay").isNotNull()).select(
        "date",
        F.concat_ws("-", "carrier", "flight", "origin", "sched_dep_time").alias("flight_id"),
        "carrier",
        "origin",
        "dest",
        F.col("hour").cast("int").alias("sched_hour"),
        F.dayofweek("date").alias("day_of_week"),
        (F.col("hour") * 60 + F.col("minute")).cast("float").alias("sched_minute"),
        _scheduled_minutes(F.col("sched_arr_time"), F.col("sched_dep_time")).cast("float").alias("sched_duration"),
        F.col("distance").cast("float").alias("distance"),
        F.col("temp").cast("float").alias("temperature"),
        F.col("humid").cast("float").alias("humidity"),
        F.col("wind_speed").cast("float").alias("wind_speed"),
        F.col("precip").cast("float").alias("precipitation"),
        F.col("visib").cast("float").alias("visibility"),
        F.col("pressure").cast("float").alias("pressure"),
        (F.year("date") - F.col("built")).cast("float").alias("plane_age"),
        F.col("seats").cast("float").alias("seats"),
        (F.col("arr_delay") > 15).cast("int").alias("delayed"),
    )


def _scheduled_minutes(arrival, departure):  # noqa: ANN001, ANN202 - Spark columns
    """Minutes between two clock times written as hhmm; over midnight, the next day. Time zones stay in."""
    from pyspark.sql import functions as F

    def minutes(clock):  # noqa: ANN001, ANN202
        return F.floor(clock / 100) * 60 + clock % 100

    return F.pmod(minutes(arrival) - minutes(departure), F.lit(1440))
