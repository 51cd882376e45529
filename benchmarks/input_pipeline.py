"""Rows per second and memory of the input pipeline, against a bare pyarrow scan of the same columns.

    python benchmarks/input_pipeline.py            # speed: medians of alternating runs in one process
    python benchmarks/input_pipeline.py --memory   # peak memory: 5 epochs, and a table of 10x the rows
    python benchmarks/input_pipeline.py --rows 3000 --row-group 1     # a table of one-row groups

The table: 17 columns (5 int64, 3 int32, 4 float, 2 double, 3 text), Snappy, row groups of 32,768
rows. All readers read all 17 columns, with the same number of threads. Processor time is that of all
threads; on a busy machine it is steadier than the rates.

The scan is pyarrow's default dataset scanner: Arrow batches in file order, text as plain strings.
Ours is a full shuffle (row groups, then rows in windows) into batches: the numbers as stored, and
text as int32 indices by the schema (two vocabularies, one hash), or, "raw text", as strings. "As trained":
TensorFlow's tensors in the step loop of a worker, which take them from blocks; "tf.data": from the dataset
for notebooks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table as Grid

from dl_on_spark.input_pipeline import BlockFeed, Cursor, RankReader, SamplePlan, open_table, to_tf_dataset
from dl_on_spark.input_pipeline.block_feed import step_of
from dl_on_spark.input_pipeline.feedable import schema_of
from dl_on_spark.lake.schema import Schema
from dl_on_spark.lake.statistics import FieldStatistics, Statistics

ROWS = 1_000_000
ROW_GROUP = 32_768
BATCH = 1_024
EPOCHS = 5
STEPS_PER_EXECUTION = 32
TEXT = {"carrier": 16, "origin": 3, "tail_number": 4_000}  # distinct words of each text column


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "dl_on_spark_benchmark")
    options.add_argument("--rows", type=int, default=ROWS)
    options.add_argument("--row-group", type=int, default=ROW_GROUP, help="rows of a row group")
    options.add_argument("--batch", type=int, default=BATCH)
    options.add_argument("--rounds", type=int, default=7, help="alternating runs of each reader")
    options.add_argument("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))))
    options.add_argument("--memory", action="store_true", help="measure peak memory instead of speed")
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--epochs", type=int, default=EPOCHS, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.peak_of is not None:
        print(json.dumps(peak_of(chosen.peak_of, chosen.epochs, chosen.threads)))
        return
    if chosen.memory:
        result = memory(chosen.dir, chosen.threads)
    else:
        path = table_of(chosen.dir, 1, chosen.rows, chosen.row_group)
        result = speed(path, chosen.batch, chosen.rounds, chosen.threads)
    print(json.dumps(result, indent=2)) if chosen.json else show(result)


def table_of(folder: Path, files: int, rows: int = ROWS, row_group: int = ROW_GROUP) -> Path:
    """The table of ``files`` files of ``rows`` rows below ``folder``; written once."""
    target = folder / f"rows_{files}x{rows}_by_{row_group}"
    if not (target / "_SUCCESS").exists():
        target.mkdir(parents=True, exist_ok=True)
        for number in range(files):
            pq.write_table(_rows(rows, number), target / f"part-{number:03d}.parquet", row_group_size=row_group)
        (target / "_SUCCESS").touch()
    return target


def _rows(rows: int, seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    columns: dict[str, object] = {}
    for i in range(5):
        columns[f"long_{i}"] = draw.integers(0, 1_000 * 10**i, rows)
    for i in range(3):
        columns[f"int_{i}"] = draw.integers(0, 100, rows, dtype=np.int32)
    for i in range(4):
        columns[f"float_{i}"] = draw.standard_normal(rows, dtype=np.float32)
    for i in range(2):
        columns[f"double_{i}"] = draw.standard_normal(rows)
    for name, count in TEXT.items():
        columns[name] = pa.array(_words(name)).take(pa.array(draw.integers(0, count, rows)))
    return pa.table(columns)


def _words(name: str) -> tuple[str, ...]:
    return tuple(f"{name[:2].upper()}{i}" for i in range(TEXT[name]))


def indexed_text(stored: Schema, rows: int) -> tuple[Schema, Statistics]:
    """The schema with text as int32: vocabularies of few words, and a hash of many."""
    described = stored.to_dict()
    known = {}
    for name, count in TEXT.items():
        by_hash = {"hash": {"buckets": 2 * count}}
        described["fields"][name]["preprocess"] = by_hash if count > 1_000 else {"vocabulary": {"max": count}}
        known[name] = FieldStatistics(count=rows, nulls=0, vocabulary=_words(name))
    return Schema.from_dict(described), Statistics(rows, "", known)


def speed(path: Path, batch_rows: int, rounds: int, threads: int) -> dict[str, object]:
    """Median rows/s of each reader over alternating rounds, and the median of the rounds' ratios to the scan."""
    pa.set_cpu_count(threads)
    snapshot = open_table(path).snapshot()
    rows = snapshot.rows
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=batch_rows, seed=7)
    raw = schema_of(snapshot.schema, str(path))
    dictionaries = pads.ParquetFileFormat(read_options=pads.ParquetReadOptions(dictionary_columns=set(TEXT)))

    def scan(dataset: pads.Dataset) -> int:
        return sum(batch.num_rows for batch in dataset.scanner().to_batches())

    def numpy_batches(reader: RankReader) -> int:
        return sum(len(features["long_0"]) for features, _, _ in reader.batches(0))

    def tensors(dataset: object) -> int:
        return _drain(dataset, plan.steps_per_epoch)

    # As in training, readers and datasets are made once; a round is one epoch.
    with (
        RankReader(snapshot, plan, *indexed_text(raw, rows), 0, 1, threads=threads) as indexed,
        RankReader(snapshot, plan, raw, None, 0, 1, threads=threads) as as_stored,
        BlockFeed(indexed.blocks, indexed.preprocessor) as feed,
        BlockFeed(as_stored.blocks, as_stored.preprocessor) as text_feed,
    ):
        readers: dict[str, Callable[[], int]] = {
            "pyarrow scan": partial(scan, pads.dataset(path)),
            "shuffled NumPy batches": partial(numpy_batches, indexed),
            "shuffled tensors, as trained": _trained(feed, plan.steps_per_epoch),
            "tensors as trained, raw text": _trained(text_feed, plan.steps_per_epoch),
            "shuffled tf.data batches": partial(tensors, to_tf_dataset(indexed, lambda: Cursor(0, 0))),
            "NumPy batches, raw text": partial(numpy_batches, as_stored),
            "tf.data batches, raw text": partial(tensors, to_tf_dataset(as_stored, lambda: Cursor(0, 0))),
            "pyarrow scan, text encoded": partial(scan, pads.dataset(path, format=dictionaries)),
            "tf.data, one constant batch": partial(tensors, _constant_dataset(next(indexed.batches(0))[0])),
        }
        seconds, processor = _timed(readers, rounds, {rows, plan.steps_per_epoch * batch_rows})
    rates = {name: rows / statistics.median(times) for name, times in seconds.items()}
    base = seconds["pyarrow scan"]
    ratios = {name: statistics.median(np.divide(base, times).tolist()) for name, times in seconds.items()}
    return {
        "benchmark": "input_pipeline",
        "rows": rows,
        "columns": len(snapshot.schema),
        "row_groups": snapshot.num_row_groups,
        "batch": batch_rows,
        "threads": threads,
        "rows_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio_to_scan": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "milliseconds_per_batch": {name: round(batch_rows / rate * 1e3, 4) for name, rate in rates.items()},
        "processor_ms_per_batch": {
            name: round(statistics.median(times) * batch_rows / rows * 1e3, 4) for name, times in processor.items()
        },
    }


Times = dict[str, list[float]]


def _timed(readers: dict[str, Callable[[], int]], rounds: int, rows: set[int]) -> tuple[Times, Times]:
    """Seconds, and processor seconds, of each reader in each round; the readers take turns within a round."""
    seconds: Times = {name: [] for name in readers}
    processor: Times = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, read in readers.items():
            start, processor_start = time.perf_counter(), time.process_time()
            found = read()
            if turn:  # the first round warms caches and traces
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - processor_start)
            if found not in rows:
                raise SystemExit(f"{name} gave {found} rows, not one of {sorted(rows)}")
    return seconds, processor


_loops: dict[str, Callable[..., object]] = {}


def _drain(dataset: object, steps: int) -> int:
    """Pull ``steps`` batches inside one `tf.function`, as the training loop does; rows seen."""
    import tensorflow as tf

    if "loop" not in _loops:

        @tf.function(reduce_retracing=True)
        def loop(iterator: object, count: object) -> object:
            rows = tf.constant(0)
            for _ in tf.range(count):
                rows += tf.shape(next(iterator)["long_0"])[0]
            return rows

        _loops["loop"] = loop
    return int(_loops["loop"](iter(dataset), tf.constant(steps)))


def _trained(feed: BlockFeed, steps: int) -> Callable[[], int]:
    """Every tensor of every batch, taken inside one `tf.function`, as a worker's step loop does."""
    import tensorflow as tf

    number = tf.TensorSpec((), tf.int32)

    @tf.function(input_signature=[feed.block_spec, number, number])
    def several(block: object, first: object, count: object) -> object:
        rows = tf.constant(0)
        for index in tf.range(first, first + count):
            # IdentityN: without a use, TensorFlow would drop the other columns.
            columns = tf.identity_n(tf.nest.flatten(step_of(block, index)))
            rows += tf.shape(columns[0])[0]
        return rows

    def epoch() -> int:
        feed.seek(Cursor(0, 0))
        rows, left = 0, steps
        while left:
            block, first, count = feed.take(min(left, STEPS_PER_EXECUTION))
            rows += int(several(block, tf.constant(first), tf.constant(count)))
            left -= count
        return rows

    return epoch


def _constant_dataset(first: dict[str, np.ndarray]) -> object:
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    dataset = tf.data.Dataset.from_tensors({name: tf.constant(values) for name, values in first.items()})
    return dataset.repeat().with_options(options)


def memory(folder: Path, threads: int) -> dict[str, object]:
    """Peak memory over the epochs of a table, and of one of 10 times the rows, each in a new process."""
    runs = {"1 epoch": (1, 1), f"{EPOCHS} epochs": (1, EPOCHS), "10x the rows, 1 epoch": (10, 1)}
    peaks = {}
    for name, (files, epochs) in runs.items():
        command = [sys.executable, __file__, "--peak-of", str(table_of(folder, files))]
        command += ["--epochs", str(epochs), "--threads", str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        peaks[name] = json.loads(done.stdout.splitlines()[-1])
    base = peaks[f"{EPOCHS} epochs"]["peak_mb"]
    return {
        "benchmark": "input_pipeline_memory",
        "peaks": peaks,
        "ratio_10x_rows": round(peaks["10x the rows, 1 epoch"]["peak_mb"] / base, 3),
    }


def peak_of(path: Path, epochs: int, threads: int) -> dict[str, object]:
    """Peak resident memory after each epoch; the process's memory before reading is shown beside it."""
    snapshot = open_table(path).snapshot()
    schema, known = indexed_text(schema_of(snapshot.schema, str(path)), snapshot.rows)
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=BATCH, seed=7)
    before = psutil.Process().memory_info().rss
    after_epoch = []
    with RankReader(snapshot, plan, schema, known, 0, 1, threads=threads) as reader:
        for epoch in range(epochs):
            for _ in reader.batches(epoch):
                pass
            after_epoch.append(_peak_mb())
    return {
        "rows": snapshot.rows,
        "before_mb": round(before / 2**20, 1),
        "peak_after_epoch_mb": after_epoch,
        "peak_mb": after_epoch[-1],
    }


def _peak_mb() -> float:
    import resource

    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def show(result: dict[str, object]) -> None:
    """Print a result as a table."""
    if "peaks" in result:
        grid = Grid("run", "rows", "before, MB", "peak, MB", title="Peak memory of the reader")
        for name, peak in result["peaks"].items():
            grid.add_row(name, f"{peak['rows']:,}", str(peak["before_mb"]), str(peak["peak_after_epoch_mb"]))
        Console().print(grid, f"10x the rows: {result['ratio_10x_rows']} times the peak")
        return
    title = (
        f"{result['rows']:,} rows x {result['columns']} columns, {result['row_groups']:,} row groups, "
        f"{result['threads']} threads, batches of {result['batch']:,}"
    )
    grid = Grid("reader", "rows/s", "of scan", "ms/batch", "processor ms", title=title)
    for name, rate in result["rows_per_second"].items():
        ratio, wall = result["ratio_to_scan"][name], result["milliseconds_per_batch"][name]
        grid.add_row(name, f"{rate:,}", f"{ratio:.2f}", f"{wall:.3f}", f"{result['processor_ms_per_batch'][name]:.3f}")
    Console().print(grid)


if __name__ == "__main__":
    main()
