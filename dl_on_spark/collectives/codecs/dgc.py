"""Deep gradient compression (Lin et al. 2018): top-k with momentum correction, clipping and a warm-up of sparsity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dl_on_spark.collectives.codecs.base import Array, Arrays, Bucket, Codec, check_fraction, check_positive
from dl_on_spark.collectives.codecs.sparse import sparse_bytes_sent, sum_sparse
from dl_on_spark.collectives.codecs.topk import count_of, largest
from dl_on_spark.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator


@dataclass(frozen=True)
class DGC(Codec):
    """Each rank keeps its own momentum ``u = m u + g`` and its unsent sum ``v = v + u``, sends the greatest of v,
    and sets u and v to zero where it sent (momentum factor masking).

    The momentum is here, so the optimizer must have none: ``SGD(momentum=0)``. ``fraction``: of a bucket's
    elements, at least one, sent at the end of the warm-up; ``warm_up``: steps in which it falls from 1/4 by a
    factor of 4 at a time, as in the paper (sparsity 75, 93.75, 98.4, 99.6, 99.9 %). ``clip``: the gradient's
    greatest 2-norm for the whole batch; each rank cuts its part of a bucket to ``clip / sqrt(P)``.
    Payload: ``8 k`` bytes. Identities: without momentum and clip, those of top-k; with nothing left unsent, the
    steps of heavy-ball momentum as long as u is not masked.
    """

    name: ClassVar[str] = "dgc"
    acts_alone: ClassVar[bool] = True
    fraction: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        check_fraction(self, fraction=self.fraction)
        if self.clip is not None:
            check_positive(self, clip=self.clip)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"dgc: momentum={self.momentum}.", fix="Use a momentum from 0 to below 1.")
        if not isinstance(self.warm_up, int) or self.warm_up < 0:
            raise ConfigError(f"dgc: warm_up={self.warm_up}.", fix="warm_up counts steps from 0 on.")

    def check_optimizer(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum and (type(inner).__name__ != "SGD" or inner.momentum):
            raise ModelError(
                f"allreduce: compress={self} has momentum, and so has the optimizer ({type(inner).__name__}).",
                fix="Compile with SGD(momentum=0), or use DGC(momentum=0).",
            )

    def fraction_at(self, step: int) -> float:
        """The fraction sent in a step, counted from 0."""
        stages = math.ceil(round(math.log(self.fraction, 0.25), 9)) - 1  # fractions of the warm-up above the last
        if step >= self.warm_up or stages < 1:
            return self.fraction
        return float(0.25 ** (1 + step * stages // self.warm_up))

    def start(self, bucket: Bucket) -> Arrays:
        zeros = np.zeros(bucket.size, bucket.dtype)
        return {"momentum": zeros, "residual": zeros}

    def reduce(
        self, gradient: Array, state: Arrays, step: int, bucket: Bucket, comm: Communicator
    ) -> tuple[Array, Arrays]:
        momentum = state["momentum"] * bucket.dtype.type(self.momentum)
        momentum += self._clipped(gradient, comm.world_size)
        residual = state["residual"] + momentum
        chosen = largest(np.abs(residual), count_of(self.fraction_at(step), bucket.size))
        sent = residual[chosen].astype(np.float32)
        residual[chosen] -= sent
        momentum[chosen] = 0
        total = sum_sparse(comm, chosen, sent, bucket.size, bucket.dtype, same_count=True)
        return total, {"momentum": momentum, "residual": residual}

    def bytes_sent(self, bucket: Bucket, world_size: int) -> float:
        """After the warm-up."""
        pairs = count_of(self.fraction, bucket.size)
        return sparse_bytes_sent(pairs, bucket.size, bucket.dtype, world_size)

    def _clipped(self, gradient: Array, world_size: int) -> Array:
        if self.clip is None:
            return gradient
        norm, limit = float(np.linalg.norm(gradient)), self.clip / math.sqrt(world_size)
        return gradient if norm <= limit else gradient * gradient.dtype.type(limit / norm)
