"""Codecs on real ranks: the same bits everywhere, the sum they promise, the bytes of their formulas."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from dl_on_spark.collectives.codecs import CODECS, DGC, Compressor, Threshold, parse_codec
from dl_on_spark.collectives.codecs.sparse import sparse_bytes_sent
from tests.collectives.codecs import ranks
from tests.collectives.codecs.buckets import reduced
from tests.collectives.codecs.ranks import STEPS, bucket_for, gradient
from tests.collectives.processes import Ranks

WORLDS = [2, 3, 5]
TEXTS = [
    *CODECS,
    "topk(0.9)",
    "dgc(0.01,0.0,none,3)",
    "threshold(1.5)",
    "powersgd(40)",
    "qsgd(1)",
    "qsgd(127)",
    "int8(100)",
]
every = pytest.mark.parametrize("text", TEXTS)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world} ranks")
def found(request: pytest.FixtureRequest) -> Found:
    with Ranks(request.param, ranks.run, TEXTS, algorithm="ring") as all_ranks:
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


@pytest.mark.parametrize("text", [text for text in TEXTS if not re.match(r"qsgd|terngrad|dgc$", text)])
def test_over_all_ranks_nothing_is_lost(found: Found, text: str) -> None:
    came_in = sum(gradient(rank, step).astype(float) for rank in range(len(found)) for step in range(STEPS))
    held = sum(one[text]["state"]["residual"].astype(float) for one in found)
    came_out = np.sum(found[0][text]["sums"], axis=0, dtype=float)
    np.testing.assert_allclose(came_out + held, came_in, rtol=0, atol=3e-5)


@every
def test_bytes_on_the_wire_are_those_of_the_formula(found: Found, text: str) -> None:
    world, codec, bucket = len(found), parse_codec(text), bucket_for(0)
    formula = codec.bytes_sent(bucket, world)
    if isinstance(codec, Threshold):  # as many as the data have
        each = [np.count_nonzero(sums) for rank in range(world) for sums in sent_alone(text, rank)]
        pairs = np.reshape(each, (world, STEPS)).mean(axis=0)
        formula = 16 * (world - 1) + np.mean(
            [sparse_bytes_sent(count, bucket.size, bucket.dtype, world) for count in pairs]
        )
    last = [one[text]["sent"][-1] for one in found] if isinstance(codec, DGC) else [one[text]["sent"] for one in found]
    assert np.mean(last) == pytest.approx(formula, rel=0.02)


@every
def test_a_value_that_is_no_number_on_one_rank_undoes_the_step_on_all(found: Found, text: str) -> None:
    for rank in found:
        assert not np.isfinite(rank[text]["bad sum"]).all()
        for name, value in rank[text]["state"].items():
            if name != "shared_step":
                np.testing.assert_array_equal(rank[text]["state after"][name], value)


@pytest.mark.parametrize("text", ["fp16", "bf16", "int8", "int8(100)", "qsgd(127)"])
def test_fine_codecs_are_near_the_sum(found: Found, text: str) -> None:
    for step, total in enumerate(found[0][text]["sums"]):
        exact = sum(gradient(rank, step).astype(float) for rank in range(len(found)))
        assert np.linalg.norm(total - exact) < 0.15 * np.linalg.norm(exact)


def test_powersgd_compresses_the_sum_as_if_one_rank_had_it(found: Found) -> None:
    one = Compressor(parse_codec("powersgd"), bucket_for(0))
    for step in range(STEPS):
        exact = sum(gradient(rank, step).astype(float) for rank in range(len(found)))
        np.testing.assert_allclose(
            found[0]["powersgd"]["sums"][step], reduced(one, exact.astype(np.float32)), atol=2e-3
        )
    held = sum(rank["powersgd"]["state"]["residual"].astype(float) for rank in found)
    np.testing.assert_allclose(held, one.state()["residual"], atol=2e-3)


def sent_alone(text: str, rank: int) -> list[np.ndarray]:
    """What one rank sends in every step, where that does not depend on the others."""
    compressor = Compressor(parse_codec(text), bucket_for(rank))
    return [reduced(compressor, gradient(rank, step)) for step in range(STEPS)]
