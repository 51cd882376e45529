"""A program of a Spark Connect user: ``connect_client.py sc://host:port folder``. It prints what it found."""

from __future__ import annotations

import json
import sys

import numpy as np
from pyspark.sql import SparkSession

from dl_on_spark import KerasEstimator, KerasModel, Trainer, open_table
from dl_on_spark.launch import examine
from dl_on_spark.ml.columns import schema_of
from dl_on_spark.ml.frames import in_place

BUILDER = "tests.ml.builders:build_on_columns"


def main(address: str, folder: str) -> None:
    spark = SparkSession.builder.remote(address).getOrCreate()
    made = spark.range(400).selectExpr("id", "cast(id % 7 as double) a", "cast(id % 3 as int) b", "id % 2 label")
    made.write.parquet(f"{folder}/table")
    rows = spark.read.parquet(f"{folder}/table")
    schema = schema_of(rows, ["a", "b"], "label", None)
    findings = examine(spark, 2, readable=[f"{folder}/table"], writable=[folder])
    result = Trainer(BUILDER, num_workers=2, checkpoint_dir=f"{folder}/run").fit(
        spark, open_table(f"{folder}/table"), schema=schema, global_batch_size=64, epochs=1, seed=3, quiet=True
    )
    estimator = KerasEstimator(
        model=BUILDER,
        featuresCols=["a", "b"],
        numWorkers=2,
        globalBatchSize=64,
        seed=3,
        quiet=True,
        storeDir=f"{folder}/store",
    )
    estimator.fit(rows).save(f"{folder}/model")
    model = KerasModel.load(f"{folder}/model")
    scored = model.transform(rows).orderBy("id").collect()
    inputs = {"a": np.array([r.a for r in scored], np.float32), "b": np.array([r.b for r in scored], np.int32)}
    expected = model.kerasModel().predict(inputs, verbose=0)[:, 0]
    found = {
        "levels": sorted({finding.level for finding in findings}),
        "same_history": model.summary.history == result.history,
        "in_place": in_place(rows, schema) is not None and in_place(rows.where("id > 0"), schema) is None,
        "columns": list(scored[0].asDict()),
        "rows": len(scored),
        "difference": float(np.abs(expected - [row.prediction for row in scored]).max()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
