"""The shared session itself: what every other Spark test stands on."""

import sys


def test_the_spark_fixture_runs_python_tasks_with_this_interpreter(spark):
    def interpreter(batches):
        import pyarrow as pa

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"path": [sys.executable]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(interpreter, "path string").collect()
    assert [row.path for row in rows] == [sys.executable] * 2
