"""Clipping, accumulation and layer-wise optimizers on two real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.collectives.processes import Ranks
from tests.sync import large_batch_ranks
from tests.sync.test_two_ranks import assert_close, assert_moved
from tests.training.worlds import PLAN, build

Found = list[dict[Any, Any]]
STEPS = 2 * PLAN.steps_per_epoch
UPDATES = {
    "accumulating": 4,
    "accumulating, clipped": 4,
    "accumulating to an epoch's end": 2,
    "accumulating, scaled": 4,
}
NAMES = ["clipnorm", "clipvalue", "global_clipnorm", "lars", "lamb", *UPDATES]


@pytest.fixture(scope="module")
def found() -> Found:
    with Ranks(2, large_batch_ranks.run, deadline_s=60) as two:
        return two.results()


@pytest.fixture(scope="module")
def gradient() -> int:
    return sum(int(np.prod(v.shape)) for v in build().trainable_weights)


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_at_a_global_batch_take_the_steps_of_one(found: Found, name: str) -> None:
    assert_close(found[0][name], found[0]["alone", name])
    assert_moved(found[0][name], build().get_weights())
    for one, other in zip(found[0][name], found[1][name], strict=True):
        np.testing.assert_array_equal(one, other)
    assert not found[0][name, "wrapped"]


def test_limits_cut_the_reduced_gradient(found: Found) -> None:
    """They are such that steps would be longer without them."""
    free = found[0]["plain"]
    for name in ("clipnorm", "clipvalue"):
        assert max(float(np.abs(a - b).max()) for a, b in zip(found[0][name], free, strict=True)) > 0.05


@pytest.mark.parametrize(("name", "updates"), list(UPDATES.items()))
def test_gradients_travel_once_an_update(found: Found, gradient: int, name: str, updates: int) -> None:
    for rank in found:
        assert rank[name, "iterations"] == updates
        pending = 0 if STEPS // updates == 7 else 2  # at the ends of both epochs
        assert rank[name, "exchanges"].count(gradient) == updates + pending
        assert rank["plain", "exchanges"].count(gradient) == STEPS
        saved = rank["plain", "bytes"] - rank[name, "bytes"]
        flags = STEPS if "scaled" in name else 0
        assert rank[name, "exchanges"].count(1) >= flags
        assert saved > 0.99 * (STEPS - updates - pending) * 4 * gradient - 4 * flags


def test_accumulation_is_the_same_eagerly(found: Found) -> None:
    assert_close(found[0]["eager"], found[0]["accumulating"], 1e-5)


def test_what_is_accumulated_can_be_compressed(found: Found) -> None:
    assert_close(found[0]["compressed"], found[0]["accumulating"], 5e-3)
    for one, other in zip(found[0]["compressed"], found[1]["compressed"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_whose_gradient_overflows_on_one_rank_is_skipped_on_both(found: Found) -> None:
    (first, scale), (second, other_scale), (alone, scale_alone) = (
        found[0]["overflow"], found[1]["overflow"], found[0]["alone", "overflow"],
    )  # fmt: skip
    assert scale == other_scale == scale_alone < 2.0**127
    assert_close(first, alone)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_resumed_between_two_updates_ends_with_the_same_weights_on_any_number_of_workers(found: Found) -> None:
    whole, resumed, on_one = found[0]["resumed"]
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_close(on_one, whole)


@pytest.mark.parametrize("name", list(large_batch_ranks.REFUSED))
def test_rounds_that_end_between_updates_are_refused(found: Found, name: str) -> None:
    for rank in found:
        kind, text = rank["refused", name]
        assert kind == "ModelError"
        assert "gradient_accumulation_steps=3" in text
        assert "multiple of 3" in text


@pytest.mark.parametrize("name", ["local_sgd:every=6", "elastic_averaging:every=3", "gossip:topology=ring,every=3"])
def test_rounds_of_whole_updates_run(found: Found, name: str) -> None:
    assert_moved(found[0][f"rounds {name}"], build().get_weights())
    for one, other in zip(found[0][f"rounds {name}"], found[1][f"rounds {name}"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_norms_of_parts_of_layers_are_refused(found: Found, name: str) -> None:
    kind, text = found[0]["parts", name]
    assert kind == "ModelError"
    assert "topk" in text
    assert name.capitalize() in text
