"""What classic Spark and Spark Connect are asked in different ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# More rows than any cluster has cores: each of `range`'s partitions gets some.
_MANY = 1 << 20


def spark_context(spark: SparkSession) -> Any | None:
    """The session's SparkContext; None under Spark Connect, which has none."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return None
    return spark.sparkContext


def default_parallelism(spark: SparkSession) -> int:
    """How many tasks the cluster runs side by side, as Spark itself counts for a job that does not say."""
    context = spark_context(spark)
    if context is not None:
        return int(context.defaultParallelism)
    from pyspark.sql import functions as F

    numbered = spark.range(_MANY).select(F.spark_partition_id().alias("partition"))
    return int(numbered.agg(F.max("partition")).collect()[0][0]) + 1
