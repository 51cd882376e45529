"""Codecs on real ranks: the same bits everywhere, the sum they promise, the bytes of their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dl_on_spark.collectives.codecs import CODECS, parse_codec
from tests.collectives.codecs import ranks
from tests.collectives.codecs.ranks import STEPS, bucket_for, gradient
from tests.collectives.processes import Ranks

WORLDS = [2, 3]
TEXTS = [*CODECS]
every = pytest.mark.parametrize("text", TEXTS)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def found(request: pytest.FixtureRequest) -> Found:
    with Ranks(request.param, ranks.run, TEXTS) as all_ranks:
        return all_ranks.results()


@every
def test_all_ranks_have_the_same_bits(found: Found, text: str) -> None:
    for other in found[1:]:
        np.testing.assert_array_equal(other[text]["sums"], found[0][text]["sums"])
        for name, value in found[0][text]["state"].items():
            if name.startswith("shared_"):
                np.testing.assert_array_equal(other[text]["state"][name], value)


@every
def test_steps_from_a_checkpoint_are_the_same_bit_for_bit(found: Found, text: str) -> None:
    np.testing.assert_array_equal(found[0][text]["resumed"], found[0][text]["sums"][STEPS // 2 :])


@every
def test_over_all_ranks_nothing_is_lost(found: Found, text: str) -> None:
    if "residual" not in found[0][text]["state"]:
        pytest.skip("no residual")
    came_in = sum(gradient(rank, step).astype(float) for rank in range(len(found)) for step in range(STEPS))
    held = sum(one[text]["state"]["residual"].astype(float) for one in found)
    came_out = np.sum(found[0][text]["sums"], axis=0, dtype=float)
    np.testing.assert_allclose(came_out + held, came_in, rtol=0, atol=3e-5)


@every
def test_bytes_on_the_wire_are_those_of_the_formula(found: Found, text: str) -> None:
    formula = parse_codec(text).bytes_sent(bucket_for(0), len(found))
    measured = np.mean([one[text]["sent"] for one in found])
    assert measured == pytest.approx(formula, rel=0.02)
