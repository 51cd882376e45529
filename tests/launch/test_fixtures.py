"""The fixtures themselves: what every other Spark test stands on."""

import json
import sys

import pytest


def test_the_spark_fixture_runs_python_tasks_with_this_interpreter(spark):
    def interpreter(batches):
        import pyarrow as pa

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"path": [sys.executable]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(interpreter, "path string").collect()
    assert [row.path for row in rows] == [sys.executable] * 2


@pytest.mark.cluster
def test_a_job_submitted_to_the_standalone_cluster_runs_on_both_workers(standalone_cluster, tmp_path):
    script = tmp_path / "hosts.py"
    script.write_text(
        "import json\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.getOrCreate()\n"
        "def executor(batches):\n"
        "    import os, pyarrow as pa\n"
        "    from pyspark import BarrierTaskContext\n"
        "    BarrierTaskContext.get()\n"
        "    for _ in batches:\n"
        "        yield pa.RecordBatch.from_pydict({'folder': [os.getcwd()]})\n"
        "rows = spark.range(0, 2, 1, 2).mapInArrow(executor, 'folder string', barrier=True).collect()\n"
        "print(json.dumps(sorted({row.folder for row in rows})))\n"
    )
    done = standalone_cluster.submit(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout.strip().splitlines()[-1])) == 2
