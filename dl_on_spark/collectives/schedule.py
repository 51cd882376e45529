"""What one rank sends and receives, step by step: plain values, no sockets.

An algorithm is a pure function of (rank, world size, number of elements). A backend carries the
steps out; a test carries them out in memory. The two halves of a step run at the same time, and a
step ends when both have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Elements ``start:stop`` of the flat buffer, to or from rank ``peer``."""

    peer: int
    start: int
    stop: int


class Step(NamedTuple):
    """One exchange; ``reduce`` says whether what arrives is combined with the span or replaces it."""

    send: Span | None
    receive: Span | None
    reduce: bool = False


Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Schedule:
    """An allreduce: after ``reduce`` this rank holds ``owned`` (start, stop) of the final values.

    Work on final values (the division of a mean) is done once, on ``owned``, before ``gather``
    spreads them; so every rank ends with the same bits. A rank that holds nothing owns (0, 0).
    """

    reduce: Steps
    owned: tuple[int, int]
    gather: Steps


def block_bounds(n: int, parts: int) -> tuple[int, ...]:
    """``parts + 1`` bounds of contiguous blocks of ``n`` elements; sizes differ by at most one."""
    size, longer = divmod(n, parts)
    return tuple(i * size + min(i, longer) for i in range(parts + 1))


@dataclass(frozen=True)
class Fold:
    """Places of the ranks in the largest power of two that fits the world.

    Of the first ``2 * extra`` ranks each odd one hands its values to the even one below it and
    waits for the result (Thakur, Rabenseifner, Gropp 2005, section 4.3). Places keep the order of
    the ranks, so "the lower rank's value is the left operand" holds throughout.
    """

    rank: int
    world_size: int

    @property
    def size(self) -> int:
        """The largest power of two not above the world size."""
        return 1 << (self.world_size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """Ranks beyond that power of two."""
        return self.world_size - self.size

    @property
    def place(self) -> int | None:
        """This rank's place among the powers of two; None when it is folded into the one below."""
        if self.rank >= 2 * self.extra:
            return self.rank - self.extra
        return None if self.rank % 2 else self.rank // 2

    def rank_at(self, place: int) -> int:
        """The rank that stands at ``place``."""
        return 2 * place if place < self.extra else place + self.extra

    def wrap(self, n: int, reduce: Steps, owned: tuple[int, int], gather: Steps) -> Schedule:
        """Add the first hand-over and the last hand-back to the steps among the places."""
        if self.place is None:
            whole = Span(self.rank - 1, 0, n)
            return Schedule((Step(whole, None),), (0, 0), (Step(None, whole),))
        if self.rank < 2 * self.extra:
            whole = Span(self.rank + 1, 0, n)
            return Schedule((Step(None, whole, True), *reduce), owned, (*gather, Step(whole, None)))
        return Schedule(reduce, owned, gather)
