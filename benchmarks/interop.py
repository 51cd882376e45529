"""Rows per second of our reader against petastorm's, on the same files, in one run; runs where petastorm's readers run.

    make interop                      # builds that environment, tests there, and runs this
    .venv-interop/bin/python benchmarks/interop.py --rounds 5

Numbers and text: a plain Parquet table (17 columns, three of text). petastorm's documented recipe for TensorFlow is
`make_petastorm_dataset(make_batch_reader(...)).unbatch().shuffle().batch()`; it is so slow that only its first rows
are timed. Tensors: a table of petastorm's Unischema with a 32x32x3 float32 `NdarrayCodec` column and an int64, which
`make_reader` reads row by row. Ours is a full shuffle in both. Rates are medians of alternating rounds, ratios
medians of each round's; "processor" is the ratio of rows per second of processor time (all threads), which is
steadier on a busy machine. petastorm's pool of processes is left out: it was the slowest, and times out when busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table as Grid

from benchmarks.input_pipeline import BATCH, _trained, indexed_text, table_of
from dl_on_spark.input_pipeline import BlockFeed, Cursor, RankReader, SamplePlan, open_table, to_tf_dataset
from dl_on_spark.input_pipeline.feedable import schema_of
from dl_on_spark.lake import Schema, Statistics, write_tensors

TENSORS = {
    "id": {"type": "bigint", "role": "feature", "nullable": False},
    "x": {"type": "binary", "codec": "ndarray", "shape": [32, 32, 3], "role": "feature", "nullable": False},
}
TENSOR_BATCH = 256


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "dl_on_spark_interop")
    options.add_argument("--rows", type=int, default=400_000)
    options.add_argument("--recipe-rows", type=int, default=10_240, help="rows that the documented recipe is timed on")
    options.add_argument("--tensors", type=int, default=8_192, help="rows of the table of tensors")
    options.add_argument("--rounds", type=int, default=3, help="alternating runs of each reader")
    options.add_argument("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))))
    options.add_argument("--part", choices=["both", "tabular", "tensors"], default="both")
    options.add_argument("--json", action="store_true", help="print JSON")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")  # petastorm's, of pyarrow's deprecated names
    pa.set_cpu_count(chosen.threads)
    results = []
    if chosen.part != "tensors":
        table = table_of(chosen.dir, 1, chosen.rows)
        results.append(tabular(table, chosen.recipe_rows, chosen.rounds, chosen.threads))
    if chosen.part != "tabular":
        results.append(tensors(tensor_table(chosen.dir, chosen.tensors), chosen.rounds, chosen.threads))
    if chosen.json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            show(result)


def tensor_table(folder: Path, rows: int) -> Path:
    """The table of tensors below ``folder``, in files of 2,048 rows and row groups of 256; written once."""
    target = folder / f"tensors_{rows}"
    draw = np.random.default_rng(7)

    def batches() -> Iterator[dict[str, Any]]:
        for at in range(0, rows, 2_048):
            some = min(2_048, rows - at)
            x = draw.standard_normal((some, 32, 32, 3), dtype=np.float32)
            yield {"id": np.arange(at, at + some), "x": x}

    if not (target / "_common_metadata").exists():
        write_tensors(target, Schema.from_dict({"name": "Tensors", "fields": TENSORS}), batches(), rows_per_group=256)
    return target


Readers = dict[str, Callable[[], int]]


def tabular(path: Path, recipe_rows: int, rounds: int, threads: int) -> dict[str, Any]:
    """Rates on a plain table, and their ratios to petastorm's documented recipe."""
    snapshot = open_table(path).snapshot()
    schema, known = indexed_text(schema_of(snapshot.schema, str(path)), snapshot.rows)
    theirs: Readers = {
        "petastorm, documented recipe": partial(_recipe, path, recipe_rows, unbatch=True),
        "petastorm, batch reader to tf.data": partial(_recipe, path, snapshot.rows, unbatch=False),
        "petastorm, batch reader (dummy pool)": partial(_batch_reader, path, "dummy"),
        "petastorm, batch reader (thread pool)": partial(_batch_reader, path, "thread"),
    }
    rates = _with_ours(path, schema, known, BATCH, threads, theirs, rounds)
    return _result("numbers and text", snapshot.rows, rates, "petastorm, documented recipe")


def tensors(path: Path, rounds: int, threads: int) -> dict[str, Any]:
    """Rates on a table of tensors, and their ratios to petastorm's `make_reader`."""
    theirs: Readers = {
        "petastorm, make_reader (thread pool)": partial(_make_reader, path, "thread"),
        "petastorm, make_reader (dummy pool)": partial(_make_reader, path, "dummy"),
    }
    rows = open_table(path).snapshot().rows
    schema = Schema.from_dict({"name": "Tensors", "fields": TENSORS})
    rates = _with_ours(path, schema, None, TENSOR_BATCH, threads, theirs, rounds)
    fastest = max(theirs, key=lambda name: statistics.median(rate for rate, _ in rates[name]))
    return _result("tensors of 32x32x3 float32", rows, rates, fastest)


# Of each reader, per round: rows per second, and per second of processor time.
Rates = dict[str, list[tuple[float, float]]]


def _with_ours(
    path: Path, schema: Schema, known: Statistics | None, batch: int, threads: int, theirs: Readers, rounds: int
) -> Rates:
    snapshot = open_table(path).snapshot()
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=1, global_batch_size=batch, seed=7)
    with (
        RankReader(snapshot, plan, schema, known, 0, 1, threads=threads) as reader,
        BlockFeed(reader.blocks, reader.preprocessor) as feed,
    ):
        first = schema.features[0].name

        def numpy_batches() -> int:
            return sum(len(features[first]) for features, _, _ in reader.batches(0))

        def dataset() -> int:
            return sum(int(features[first].shape[0]) for features in to_tf_dataset(reader, lambda: Cursor(0, 0)))

        ours: Readers = {
            "ours, shuffled NumPy batches": numpy_batches,
            "ours, shuffled tf.data batches": dataset,
            "ours, shuffled tensors, as trained": _trained(feed, plan.steps_per_epoch),
        }
        return _timed({**ours, **theirs}, rounds)


def _timed(readers: Readers, rounds: int) -> Rates:
    """Rows per second of each reader in each round; the readers take turns within a round."""
    rates: Rates = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, read in readers.items():
            start, processor = time.perf_counter(), time.process_time()
            rows = read()
            if turn:  # the first round warms caches and traces
                rates[name].append((rows / (time.perf_counter() - start), rows / (time.process_time() - processor)))
    return rates


def _recipe(path: Path, rows: int, *, unbatch: bool) -> int:
    from petastorm import make_batch_reader
    from petastorm.tf_utils import make_petastorm_dataset

    seen = 0
    with make_batch_reader(f"file://{path}", num_epochs=1) as reader:
        dataset = make_petastorm_dataset(reader)
        if unbatch:
            dataset = dataset.unbatch().shuffle(10 * BATCH).batch(BATCH)
        for batch in dataset:
            seen += int(batch.long_0.shape[0])
            if seen >= rows:
                break
    return seen


def _batch_reader(path: Path, pool: str) -> int:
    from petastorm import make_batch_reader

    with make_batch_reader(f"file://{path}", num_epochs=1, reader_pool_type=pool) as reader:
        return sum(len(batch.long_0) for batch in reader)


def _make_reader(path: Path, pool: str) -> int:
    from petastorm import make_reader

    with make_reader(f"file://{path}", num_epochs=1, reader_pool_type=pool) as reader:
        return sum(1 for _ in reader)


def _result(title: str, rows: int, rates: Rates, base: str) -> dict[str, Any]:
    ratios = {name: np.median(np.divide(found, rates[base]), axis=0) for name, found in rates.items()}
    return {
        "benchmark": f"interop: {title}",
        "rows": rows,
        "base": base,
        "rows_per_second": {name: round(statistics.median(r for r, _ in found)) for name, found in rates.items()},
        "ratio": {name: round(float(wall), 2) for name, (wall, _) in ratios.items()},
        "processor_ratio": {name: round(float(processor), 2) for name, (_, processor) in ratios.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Print a result as a table."""
    title = f"{result['benchmark']}, {result['rows']:,} rows; 1 = {result['base']}"
    grid = Grid("reader", "rows/s", "ratio", "processor", title=title)
    for name, rate in result["rows_per_second"].items():
        grid.add_row(name, f"{rate:,}", f"{result['ratio'][name]:,}", f"{result['processor_ratio'][name]:,}")
    Console().print(grid)


if __name__ == "__main__":
    main()
