"""What the planner asks of real workers: the time of a step, and of an exchange between them.

The entry that `jobs.plan` launches: each case trains a fresh model for some steps with the trainer's own loop and
reader, and leaves nothing behind.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.collectives.probe import measure_exchanges
from dl_on_spark.concurrency import Shape, work_of
from dl_on_spark.input_pipeline import BlockFeed, Cursor, RankReader, SamplePlan
from dl_on_spark.lake import Schema, Snapshot, Statistics
from dl_on_spark.launch import WorkerContext
from dl_on_spark.sync import parse_sync
from dl_on_spark.sync.base import StepRows
from dl_on_spark.training import state
from dl_on_spark.training.keras_loop import fit_worker
from dl_on_spark.training.model_loading import build, check_inputs, load_model_builder

STEPS_PER_EXECUTION = 16
_CASE_S = 2.5
_LEAST_EXECUTIONS, _MOST_EXECUTIONS = 4, 60
_SEED = 7


@dataclass(frozen=True)
class MeasureJob:
    """``cases``: (global batch, sync) to be timed one after the other; none but the network where there are none."""

    model: str | Callable[..., Any]
    snapshot: str
    schema: dict[str, Any]
    statistics: str
    cases: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Timed:
    """A case: ``rows`` of one worker's step, its median ``seconds``, standard deviation over mean (``spread``) of one
    step, and ``busy``: processor seconds of this worker per second."""

    rows: float
    sync: str
    seconds: float
    spread: float
    busy: float


def run(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Time the cases, then the network. Returns plain values, of this rank."""
    job = MeasureJob(**pickle.loads(payload))
    with Communicator.from_listener(
        context.listener, context.rank, context.peers, context.secret, deadline_s=context.deadline_s
    ) as comm:
        timed = [_time(context, comm, job, batch, sync) for batch, sync in job.cases]
        exchanges = measure_exchanges(comm) if comm.world_size > 1 else []
    return {
        "host": context.host,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "timed": [vars(one) for one in timed],
        "exchanges": exchanges,
        "shape": _shape(job) if context.rank == 0 and job.cases else None,
    }


def _time(context: WorkerContext, comm: Communicator, job: MeasureJob, batch: int, sync: str) -> Timed:
    """Train a fresh model for a while on all ranks."""
    schema, snapshot = Schema.from_dict(job.schema), Snapshot.from_json(job.snapshot)
    plan = SamplePlan.create(snapshot.row_groups.rows, num_workers=comm.world_size, global_batch_size=batch, seed=_SEED)
    keras.utils.set_random_seed(_SEED)
    model = build(load_model_builder(job.model), schema, plan, alone=comm.world_size == 1)
    deadline_s = context.deadline_s
    with (
        RankReader(
            snapshot,
            plan,
            schema,
            Statistics.from_json(job.statistics),
            context.rank,
            comm.world_size,
            threads=max(1, context.cpus),
            deadline_s=deadline_s,
        ) as reader,
        BlockFeed(reader.blocks, reader.preprocessor, deadline_s=deadline_s) as feed,
    ):
        check_inputs(model, reader.preprocessor.feature_names)
        state.build_variables(model, feed.element_spec)
        session = parse_sync(sync).start(model, comm, StepRows(plan, context.rank, comm.world_size))
        try:
            clock = _Clock(model, comm, context)
            fit_worker(
                model,
                feed,
                plan=plan,
                comm=comm,
                session=session,
                epochs=_MOST_EXECUTIONS,
                start=Cursor(0, 0),
                steps_per_execution=max(1, min(STEPS_PER_EXECUTION, plan.steps_per_epoch)),
                hooks=[clock],
            )
        finally:
            session.close()
    return clock.result(batch / comm.world_size, sync)


class _Clock:
    """Times executions of several steps, and stops all ranks after the same one."""

    def __init__(self, model: keras.Model, comm: Communicator, context: WorkerContext) -> None:
        self._model, self._comm, self._context = model, comm, context
        self._seconds: list[tuple[int, float]] = []
        self._executions = 0
        self._spent = self._used = 0.0
        self._began = self._busy = 0.0

    def steps_until_due(self, cursor: Cursor) -> int | None:
        """Takes what comes."""
        return None

    def on_steps(self, cursor: Cursor, steps: int, seconds: float) -> None:
        """The first execution traces the model and is not counted."""
        self._executions += 1
        if self._executions == 1:
            self._began, self._busy = time.perf_counter(), time.process_time()
        else:
            self._seconds.append((steps, seconds))
        self._context.channel.progress(self._executions)
        spent = time.perf_counter() - self._began
        enough = np.array([spent > _CASE_S and len(self._seconds) >= _LEAST_EXECUTIONS], np.int64)
        self._comm.broadcast(enough, root=0)
        self._spent, self._used = spent, time.process_time() - self._busy
        if enough[0]:
            self._model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Nothing to keep."""

    def result(self, rows: float, sync: str) -> Timed:
        """Mean step; a step's spread follows from that of executions of n steps by sqrt(n)."""
        full = max(steps for steps, _ in self._seconds)
        each = [seconds / steps for steps, seconds in self._seconds if steps == full]
        mean = statistics.fmean(each)
        # Robust: on a shared machine single executions are disturbed by others.
        middle = statistics.median(abs(value - statistics.median(each)) for value in each) * 1.4826
        busy = self._used / max(self._spent, 1e-9)
        return Timed(rows, sync, statistics.median(each), middle / mean * full**0.5, busy)


def _shape(job: MeasureJob) -> dict[str, Any] | None:
    """The model's structure, or None where its layers do not tell it."""
    rows = Snapshot.from_json(job.snapshot).row_groups.rows
    plan = SamplePlan.create(rows, num_workers=1, global_batch_size=job.cases[0][0], seed=_SEED)
    model = build(load_model_builder(job.model), Schema.from_dict(job.schema), plan, alone=True)
    try:
        return vars(Shape.of(work_of(model, batch=1), _slots(model)))
    except ValueError:
        return None


def _slots(model: keras.Model) -> int:
    """Arrays of the weights' size that the optimizer keeps."""
    sizes = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    model.optimizer.build(model.trainable_variables)
    kept = sum(int(np.prod(v.shape)) for v in model.optimizer.variables)
    return round(kept / max(1, sizes))
