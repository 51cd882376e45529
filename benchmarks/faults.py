"""The fault matrix: fault x strategy x moment, each on a real run with two workers; what survived, what was lost.

    python -m benchmarks.faults [--cells N] [--seed S] [--fault F ...] [--sync S ...] [--moment M ...] [--json]

Without ``--cells`` all cells run (hours); with it, N of them, drawn by the seed, which also chooses rank and step. A
run survives when it resumed by itself, or ended with one message and exit code 4 (2 where a table's file vanished,
which the message names) and the same call then resumed it; when its weights are bit for bit those of an undisturbed
run, and its metrics, too; and when no process, port, shared memory or temporary folder is left. Recovery is the time
from the fault (or, where the run ended, from the second call) to the next step; a fresh start the time from `fit` to
the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file

from benchmarks.fault_injection import CHECKPOINT_EVERY, FAULTS, MOMENTS, Fault, callbacks_with, first_steps
from benchmarks.leftovers import nothing_left
from dl_on_spark import Schema, Trainer, TrainingResult, open_table
from dl_on_spark.errors import DLOnSparkError

STRATEGIES = ("allreduce", "local_sgd:every=4", "elastic_averaging:every=4", "gossip:every=4", "parameter_server")
ROWS = 1_037
_CELL_S = 300
_FIELDS = {
    "a": {"type": "float", "role": "feature", "preprocess": "standardize"},
    "b": {"type": "float", "role": "feature"},
    "label": {"type": "int", "role": "label"},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One cell's end. ``lost``: why it is no success, "" where it is one; times in seconds, None where unknown."""

    sync: str
    fault: str
    moment: str
    rank: int
    how: str
    lost: str
    recovery_s: float | None
    fresh_s: float | None


class Matrix:
    """Runs cells in one Spark session; reference runs are made once for each strategy."""

    def __init__(self, spark, folder: Path, seed: int, deadline_s: float = 30.0, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._spark, self._folder, self._draw, self._deadline_s = spark, folder, random.Random(seed), deadline_s
        self._undisturbed: dict[str, TrainingResult] = {}
        self._count = 0
        _write_table(folder / "table")

    def run(self, sync: str, kind: str, moment: str) -> Outcome:
        """One cell, with its own copy of the table and its own run folder."""
        if sync not in self._undisturbed:
            self._undisturbed[sync] = self._fit(sync, self._fault("", "", 0, 0))
        fault = self._fault(kind, moment, self._draw.randrange(2), self._draw.choice((7, 8, 9, 10)))
        began, how, lost, resubmitted = time.time(), "resumed", "", None
        before = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(_CELL_S)
        try:
            with nothing_left(self._scratch):
                try:
                    result = self._fit(sync, fault)
                except DLOnSparkError as error:
                    expected = 2 if kind == "vanished" else 4
                    if error.exit_code != expected or (kind == "vanished" and "part-0.parquet" not in error.message):
                        lost = f"exit code {error.exit_code}: {error.message}"
                    how = f"ended with {error.exit_code}, resumed when submitted again"
                    for gone in Path(fault.table).glob(".*.gone"):
                        gone.rename(gone.with_name(gone.name[1:].removesuffix(".gone")))
                    resubmitted = time.time()
                    result = self._fit(sync, fault)
                if fault.struck_at is None:
                    lost = "the fault did not strike"
                elif result.restarts == 0 and resubmitted is None:
                    how = "went on"
                lost = lost or _difference(self._undisturbed[sync], result)
        except Exception as error:
            lost = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        steps, since = first_steps(fault.control), resubmitted or fault.struck_at
        later = [done for training, done in steps if since is not None and training > since]
        fresh = steps[0][1] - began if steps and steps[0][0] < (since or 0) else None
        recovery = later[0] - since if later and since is not None else None
        return Outcome(sync, kind, moment, fault.rank, how, lost, recovery, fresh)

    def _fault(self, kind: str, moment: str, rank: int, step: int) -> Fault:
        self._count += 1
        cell = self._folder / f"cell-{self._count}"
        (cell / "control").mkdir(parents=True)
        return Fault(kind, moment, rank, step, str(cell / "control"), str(cell / "run"), str(self._folder / "table"))

    def _fit(self, sync: str, fault: Fault) -> TrainingResult:
        trainer = Trainer(
            model="benchmarks.fault_injection:build_model",
            sync=sync,
            num_workers=2,
            checkpoint_dir=fault.run,
            deadline_s=self._deadline_s,
            checkpoint_every=CHECKPOINT_EVERY,
        )
        return trainer.fit(
            self._spark,
            open_table(fault.table),
            schema=Schema.from_dict({"name": "small", "fields": _FIELDS}),
            global_batch_size=64,
            epochs=2,
            steps_per_execution=2,
            callbacks=callbacks_with(fault),
            quiet=True,
        )


def _write_table(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 2, ROWS).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)
    rows = pa.table({"a": a, "b": b, "label": (a - 3 + b > 0.3 * rng.normal(size=ROWS)).astype(np.int32)})
    for number, start in enumerate(range(0, ROWS, 300)):
        pq.write_table(rows.slice(start, 300), folder / f"part-{number}.parquet", row_group_size=100)


def _difference(one: TrainingResult, other: TrainingResult) -> str:
    """What of the two runs' ends differs; "" where nothing does."""
    if (one.steps, one.epochs) != (other.steps, other.epochs):
        return f"{other.steps} steps in {other.epochs} epochs instead of {one.steps} in {one.epochs}"
    first, second = (load_file(_last_checkpoint(run) / "model.safetensors") for run in (one, other))
    different = [name for name in first if not np.array_equal(first[name], second.get(name, np.zeros(0)))]
    different += [name for name, values in one.history.items() if not np.allclose(values, other.history[name], 1e-6)]
    return f"other values than undisturbed: {', '.join(different[:3])}" if different else ""


def _last_checkpoint(result: TrainingResult) -> Path:
    return sorted(Path(result.run_dir, "checkpoints").glob("*/manifest.json"))[-1].parent


def _too_long(_signal, _frame) -> None:
    raise TimeoutError(f"not over after {_CELL_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, help="draw so many cells (default: all)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000), help="default: a new one")
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--sync", nargs="*", default=STRATEGIES)
    parser.add_argument("--moment", nargs="*", choices=MOMENTS, default=MOMENTS)
    parser.add_argument("--deadline-s", type=float, default=30.0, help="of the runs; a stopped worker takes so long")
    parser.add_argument("--json", action="store_true", help="a JSON object a cell")
    args = parser.parse_args()
    cells = list(itertools.product(args.sync, args.fault, args.moment))
    if args.cells is not None:
        cells = sorted(random.Random(args.seed).sample(cells, min(args.cells, len(cells))))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder, "spark")
        matrix = Matrix(_session(scratch), Path(folder), args.seed, args.deadline_s, scratch)
        outcomes = []
        for number, cell in enumerate(cells, 1):
            outcomes.append(matrix.run(*cell))
            _show(outcomes[-1], f"{number}/{len(cells)}", as_json=args.json)
    lost = sum(bool(outcome.lost) for outcome in outcomes)
    if not args.json:
        ratios = [o.recovery_s / o.fresh_s for o in outcomes if o.recovery_s and o.fresh_s and o.fault != "stop"]
        took = f"; recovery {statistics.median(ratios):.2f} x a fresh start (median, stops apart)" if ratios else ""
        print(f"seed {args.seed}: {len(cells)} tried, {len(cells) - lost} survived, {lost} lost{took}")
    sys.exit(1 if lost else 0)


def _session(scratch: Path):
    import os

    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.local.dir": str(scratch),
        "spark.driver.host": "127.0.0.1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    }
    return SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()


def _show(outcome: Outcome, number: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)
        return
    cell = f"{outcome.sync:26}{outcome.fault:10}{outcome.moment:11} rank {outcome.rank}"
    took = "" if outcome.recovery_s is None else f"{outcome.recovery_s:5.1f} s"
    fresh = "" if outcome.fresh_s is None else f"fresh {outcome.fresh_s:5.1f} s"
    end = f"LOST: {outcome.lost}" if outcome.lost else f"survived: {outcome.how}"
    print(f"{number:>8}  {cell}  {took:8} {fresh:14} {end}", flush=True)


if __name__ == "__main__":
    main()
