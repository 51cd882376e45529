"""What a codec is: a frozen description of how ranks sum a bucket of gradients in fewer bytes.

A codec keeps what it could not send: with the gradient g and the residual e it compresses ``p = g + e``, sends
``q = C(p)`` and keeps ``e = p - q`` (error feedback; Seide et al. 2014, Karimireddy et al. 2019). So nothing is
lost: all that went in is the sum of all that came out and what the residuals hold. Gradients come weighted by
rows, so residuals are weighted too, and the result is a sum over ranks, not a mean.

A codec is pure: `Codec.reduce` takes a state and gives a new one. `Compressor` holds the state of one bucket.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import ConfigError

if TYPE_CHECKING:
    from dl_on_spark.collectives import Communicator

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Octets = npt.NDArray[np.uint8]

SHARED = "shared_"
"""How names of state begin that is equal on all ranks; all other state is a rank's own."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, as one flat array of ``dtype`` (float32 or float64), on one rank.

    ``shapes``: of the tensors, in their order in the flat array. ``number`` tells a run's buckets apart.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    rank: int = 0
    seed: int = 0
    number: int = 0

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [int(np.prod(shape)) for shape in self.shapes]

    @cached_property
    def size(self) -> int:
        """Elements of all tensors."""
        return sum(self.sizes)

    def split(self, flat: Array) -> list[Array]:
        """Views of the tensors' parts of ``flat``, each flat."""
        return np.split(flat, np.cumsum(self.sizes)[:-1])

    def rng(self, step: int, *, shared: bool = False) -> np.random.Generator:
        """Random numbers of one step: this rank's own, or the same on all ranks."""
        return np.random.default_rng((self.seed, self.number, step, 0 if shared else self.rank + 1))


class Codec(ABC):
    """How gradients become few bytes. Instances are frozen; `str` gives the text that `parse_codec` reads."""

    name: ClassVar[str]
    #: Whether it changes the steps of a world of one too, where nothing travels.
    acts_alone: ClassVar[bool] = False

    def __str__(self) -> str:
        values = [
            (getattr(self, field.name), field.default)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        ]
        while values and values[-1][0] == values[-1][1]:
            values.pop()
        given = ",".join("none" if value is None else repr(value) for value, _ in values)
        return f"{self.name}({given})" if given else self.name

    def check_optimizer(self, optimizer: Any) -> None:  # noqa: B027 - most codecs go with any optimizer
        """Raise `ModelError` where this codec and the Keras optimizer do not go together."""

    @abstractmethod
    def start(self, bucket: Bucket) -> Arrays:
        """The state before the first step."""

    @abstractmethod
    def reduce(
        self, gradient: Array, state: Arrays, step: int, bucket: Bucket, comm: Communicator
    ) -> tuple[Array, Arrays]:
        """Sum over ranks of what they send, shape (bucket.size,), bit-identical on all; and the new state.

        ``gradient`` and ``state`` stay as they are. Where a rank's gradient has a value that is no finite
        number, so has the sum.
        """

    @abstractmethod
    def bytes_sent(self, bucket: Bucket, world_size: int) -> float:
        """Payload bytes that a rank sends in a step, on average over the ranks."""


class Compressor:
    """A codec at work on one bucket, with the state that goes into checkpoints."""

    def __init__(self, codec: Codec, bucket: Bucket) -> None:
        self.bucket = bucket
        self._codec = codec
        self._step = 0
        self._state = codec.start(bucket)

    def reduce(self, gradient: Array, comm: Communicator) -> Array:
        """Sum over ranks of the compressed gradients, shape (bucket.size,): the same bits on all ranks.

        A sum with a value that is no finite number leaves the state as it was, on all ranks alike: a loss
        scaler skips that step, and a residual would never recover.
        """
        with np.errstate(all="ignore"):
            total, state = self._codec.reduce(gradient, self._state, self._step, self.bucket, comm)
        self._step += 1
        if np.isfinite(total).all():
            self._state = state
        return total

    def state(self) -> Arrays:
        """What a checkpoint keeps."""
        return {**self._state, f"{SHARED}step": np.array(self._step)}

    def load_state(self, state: Arrays) -> None:
        """Take what `state` gave; what is not in it begins anew."""
        self._step = int(state[f"{SHARED}step"])
        self._state = {name: np.array(state.get(name, fresh)) for name, fresh in self._state.items()}


def check_count(codec: Codec, **options: Any) -> None:
    """Raise `ConfigError` for an option that is no whole number from 1 on."""
    for name, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{codec.name}: {name}={value}.", fix="Use a whole number from 1 on.")


def check_positive(codec: Codec, **options: Any) -> None:
    """Raise `ConfigError` for an option that is no number above 0."""
    for name, value in options.items():
        if not 0 < value < np.inf:
            raise ConfigError(f"{codec.name}: {name}={value}.", fix="Use a number above 0.")


def check_fraction(codec: Codec, **options: Any) -> None:
    """Raise `ConfigError` for an option that is no fraction above 0."""
    for name, value in options.items():
        if not 0 < value <= 1:
            raise ConfigError(f"{codec.name}: {name}={value}.", fix="Use a fraction above 0 and up to 1.")
