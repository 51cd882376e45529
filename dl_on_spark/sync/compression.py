"""The compressors of a session: one for every bucket that a training step reduces."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from dl_on_spark.collectives.codecs import Bucket, Codec, Compressor
from dl_on_spark.collectives.codecs.base import SHARED
from dl_on_spark.errors import ModelError
from dl_on_spark.sync.base import Arrays

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

logger = logging.getLogger(__name__)


class BucketCompressors:
    """Compressors by the place of their bucket in the step, made when the step is traced.

    A step is traced again for every batch size; its buckets are the same each time. Residuals belong to their
    rank: one that resumes from another rank's state (the number of workers changed) begins with none.
    """

    def __init__(self, codec: Codec, comm: Communicator, seed: int) -> None:
        self._codec, self._comm, self._seed = codec, comm, seed
        self._made: dict[str, Compressor] = {}
        self._saved: Arrays = {}

    def at(self, reduction: int, number: int, shapes: list[tuple[int, ...]], dtype: np.dtype[Any]) -> Compressor:
        """The compressor of bucket ``number`` of the step's reduction ``reduction``, which has these tensors."""
        key = f"{reduction:02d}/{number:04d}"
        bucket = Bucket(tuple(shapes), dtype, self._comm.rank, self._seed, reduction * 10_000 + number)
        if key not in self._made:
            compressor = self._made[key] = Compressor(self._codec, bucket)
            saved = {name.removeprefix(f"{key}/"): a for name, a in self._saved.items() if name.startswith(f"{key}/")}
            if saved:
                compressor.load_state(saved)
        if self._made[key].bucket != bucket:
            raise ModelError(
                f"allreduce: the model's train_step reduces other gradients than before ({shapes}), "
                f"so compress={self._codec} has no place for what it could not send.",
                fix="Let every train_step reduce the same variables, or leave compress out.",
            )
        return self._made[key]

    def state(self) -> Arrays:
        """What a checkpoint keeps of this rank."""
        made = {f"{key}/{name}": a for key, one in self._made.items() for name, a in one.state().items()}
        return {**self._saved, **made, "rank": np.array(self._comm.rank)}

    def load_state(self, state: Arrays) -> None:
        """Take what `state` gave, before the first step."""
        foreign = bool(state) and int(state["rank"]) != self._comm.rank
        if foreign:
            logger.warning("the number of workers changed: rank %d begins without residual.", self._comm.rank)
        self._saved = {name: a for name, a in state.items() if not foreign or f"/{SHARED}" in name}
