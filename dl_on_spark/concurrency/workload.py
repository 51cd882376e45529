"""What the planner has to know: the model's step on one worker, and the machines that would run it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dl_on_spark.concurrency.communication import Link
from dl_on_spark.concurrency.work_depth import ModelWork


@dataclass(frozen=True)
class Shape:
    """What of a model's structure costs memory and communication. The defaults are those of a model not known.

    ``weight_bytes``: what a gradient or a model takes on the wire; ``slots``: arrays of that size that the optimizer
    keeps. ``activation_bytes`` of one row; ``boundary_bytes``: of one row's output of a middle layer;
    ``exchanged_bytes``: of all outputs of layers that have weights, a row; ``largest_layer``: the share of the work
    that is in one layer.
    """

    weight_bytes: int = 0
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    largest_layer: float = 1.0
    slots: int = 2

    @classmethod
    def of(cls, work: ModelWork, slots: int = 2) -> Shape:
        """From the counts of `work_of`."""
        batch = work.batch
        weighted = [layer for layer in work.layers if layer.parameters] or list(work.layers)
        outputs = sorted(layer.outputs for layer in weighted)
        done = [layer.work for layer in work.layers]
        return cls(
            weight_bytes=4 * work.parameters,
            activation_bytes=work.activation_bytes / batch,
            boundary_bytes=4 * outputs[len(outputs) // 2] / batch,
            exchanged_bytes=4 * sum(outputs) / batch,
            largest_layer=max(done) / max(1.0, sum(done)),
            slots=slots,
        )


@dataclass(frozen=True)
class Workload:
    """A training run, measured on one worker or estimated from the model's work.

    A step over b rows takes ``step_s + b row_s`` seconds on one worker that has its cores to itself, reading
    included. ``exchange_s``: seconds that a step's exchange costs beside the network (the way out of TensorFlow and
    back). ``spread``: standard deviation of a step over its mean. ``noise_scale``: simple gradient noise scale in
    rows, where known.
    """

    rows: int
    epochs: int
    batch: int
    step_s: float
    row_s: float
    shape: Shape = Shape()
    exchange_s: float = 0.0
    spread: float = 0.0
    noise_scale: float | None = None

    def compute_s(self, rows: float) -> float:
        """Seconds of a step over so many rows on one worker."""
        return self.step_s + rows * self.row_s

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.rows / self.batch)


@dataclass(frozen=True)
class Cluster:
    """Hosts of one kind. ``cores``: of a host; ``threads``: that one worker keeps busy; ``inside``, ``between``:
    links of two workers on one host and on two. ``failures_per_hour``: of one worker; ``price_per_hour``: of one."""

    workers_per_host: int
    cores: int
    threads: float
    inside: Link
    between: Link
    failures_per_hour: float = 0.0
    restart_s: float = 30.0
    price_per_hour: float = 0.0

    def contention(self, workers: int) -> float:
        """How much longer a worker takes because its host has too few cores for all: at least 1."""
        return max(1.0, min(workers, self.workers_per_host) * self.threads / self.cores)

    def hosts(self, workers: int) -> int:
        """Hosts that so many workers fill."""
        return math.ceil(workers / self.workers_per_host)

    def link(self, workers: int) -> Link:
        """The slowest link in the way of an exchange between all workers."""
        return self.between if self.hosts(workers) > 1 else self.inside


def device_row_s(work: ModelWork, operations_per_s: float, bytes_per_s: float) -> float:
    """Seconds of one row of a training step on a device that is not at hand: the roofline (Williams et al., 2009).

    Each layer takes the longer of its operations and its bytes; a multiply-accumulate is one operation, and the
    backward pass moves twice the bytes of the forward one.
    """
    seconds = sum(
        max(
            layer.work / operations_per_s,
            3 * 4 * (layer.inputs + layer.outputs) / bytes_per_s,
        )
        for layer in work.layers
    )
    return seconds / work.batch
