"""Training speed: our workers against plain Keras `fit` on the same table, in one run, as ratios.

    python benchmarks/training.py [--rows N] [--batch 1024] [--epochs 3] [--repeats 3] [--sync S ...] [--json]

Each worker is pinned to one core and has one thread; so is the plain Keras process it is compared with
(the unpinned one is shown beside it). Rows per second are those of the epochs after the first, which
holds the tracing. All kinds run in turn, `--repeats` times; the medians are compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FEATURES = [f"f{i}" for i in range(10)]
STEPS_PER_EXECUTION = 32


def build_model():
    """The model of the flights' size: 10-128-64-1, about 9.7 k parameters."""
    import keras

    inputs = {name: keras.Input((), name=name, dtype="float32") for name in FEATURES}
    columns = [keras.layers.Reshape((1,))(column) for column in inputs.values()]
    hidden = keras.layers.Dense(128, "relu")(keras.layers.Concatenate()(columns))
    hidden = keras.layers.Dense(64, "relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(
        keras.optimizers.Adam(1e-3),
        "binary_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    return model


def write_table(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((len(FEATURES), rows)).astype(np.float32)
    label = (values.sum(axis=0) + rng.standard_normal(rows) > 0).astype(np.int32)
    table = pa.table({**dict(zip(FEATURES, values, strict=True)), "label": label})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "part-0.parquet", row_group_size=32_768)


def schema():
    from dl_on_spark import Schema

    fields = {name: {"type": "float", "role": "feature"} for name in FEATURES}
    return Schema.from_dict({"name": "bench", "fields": {**fields, "label": {"type": "int", "role": "label"}}})


def clock_callbacks(rank: int, *, folder: str, pin: bool):
    """Callbacks of one worker: pin all its threads to core `rank`, write each epoch's seconds to a file."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_train_begin(self, logs=None):
            if pin:
                for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
                    os.sched_setaffinity(int(thread), {rank % os.cpu_count()})

        def on_epoch_begin(self, epoch, logs=None):
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds.append(time.perf_counter() - self.began)
            Path(folder, f"rank-{rank}.json").write_text(json.dumps(self.seconds))

    return [Clock()]


def run_plain(table: Path, work: Path, args, *, pinned: bool) -> list[float]:
    """Plain Keras `fit` in a process of its own; seconds of each epoch."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if pinned:
        for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
            environment[name] = "1"
    command = [sys.executable, __file__, "--plain", str(table), str(work), "--batch", str(args.batch)]
    command += ["--epochs", str(args.epochs), *(["--pinned"] if pinned else [])]
    subprocess.run(command, check=True, env=environment, timeout=600)
    return json.loads((work / "rank-0.json").read_text())


def plain_process(table: str, work: str, batch: int, epochs: int, pinned: bool) -> None:
    if pinned:
        os.sched_setaffinity(0, {0})
    from dl_on_spark import open_table

    dataset = open_table(table).to_tf_dataset(batch, schema=schema(), seed=7)
    callbacks = clock_callbacks(0, folder=work, pin=pinned)
    build_model().fit(dataset, epochs=epochs, verbose=0, callbacks=callbacks)


def run_trainer(spark, table: Path, work: Path, args, *, workers: int, sync: str) -> list[float]:
    """Our trainer; seconds of each epoch of rank 0."""
    from dl_on_spark import Trainer, open_table

    trainer = Trainer(
        model="benchmarks.training:build_model",
        sync=sync,
        num_workers=workers,
        cpus_per_worker=1,
        checkpoint_dir=str(work / "run"),
        max_restarts=0,
    )
    trainer.fit(
        spark,
        open_table(str(table)),
        schema=schema(),
        global_batch_size=args.batch * workers,
        epochs=args.epochs,
        seed=7,
        resume="never",
        steps_per_execution=STEPS_PER_EXECUTION,
        callbacks=functools.partial(clock_callbacks, folder=str(work), pin=True),
        quiet=True,
    )
    return json.loads((work / "rank-0.json").read_text())


def _two_workers(spark, table: Path, args, sync: str, work: Path) -> list[float]:
    return run_trainer(spark, table, work, args, workers=2, sync=sync)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="rows per worker and step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sync", nargs="+", default=["allreduce", "local_sgd:every=16"], help="of the two workers")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plain", nargs=2, metavar=("TABLE", "WORK"), help=argparse.SUPPRESS)
    parser.add_argument("--pinned", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        plain_process(*args.plain, args.batch, args.epochs, args.pinned)
        return
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.scheduler.barrier.maxConcurrentTasksCheck.interval", "1s")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table")
        write_table(table, args.rows)
        kinds = {
            "plain fit, pinned": lambda work: run_plain(table, work, args, pinned=True),
            "plain fit, unpinned": lambda work: run_plain(table, work, args, pinned=False),
            "1 worker, allreduce": lambda work: run_trainer(spark, table, work, args, workers=1, sync="allreduce"),
        }
        for sync in args.sync:
            kinds[f"2 workers, {sync}"] = functools.partial(_two_workers, spark, table, args, sync)
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(args.repeats):
            for kind, run in kinds.items():
                work = Path(folder, f"{repeat}-{len(kind)}-{abs(hash(kind))}")
                work.mkdir()
                seconds = run(work)[1:]
                speeds[kind].append(args.rows * len(seconds) / sum(seconds))
    spark.stop()
    report(args, speeds)


def report(args, speeds: dict[str, list[float]]) -> None:
    medians = {kind: statistics.median(values) for kind, values in speeds.items()}
    base = medians["plain fit, pinned"]
    result = {kind: {"rows_per_second": m, "ratio": m / base, "all": speeds[kind]} for kind, m in medians.items()}
    if args.json:
        print(json.dumps({"batch": args.batch, "rows": args.rows, "results": result}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Training, {args.batch} rows per worker and step, medians of {args.repeats}")
    for heading in ("kind", "rows/s", "to plain fit, pinned", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind, found in result.items():
        low, high = min(found["all"]), max(found["all"])
        table.add_row(kind, f"{found['rows_per_second']:,.0f}", f"{found['ratio']:.2f}", f"{low:,.0f}", f"{high:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
