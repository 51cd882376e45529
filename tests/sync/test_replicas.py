"""Elastic averaging and gossip in real processes: formulas, conservation, limits, published weights, resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dl_on_spark.sync.elastic_averaging import BETA
from dl_on_spark.sync.gossip import TOPOLOGIES
from tests.collectives.processes import Ranks
from tests.sync import replica_ranks
from tests.sync.mixing import mixing
from tests.sync.replica_ranks import ROUND, ROUNDS, STRATEGIES, WORLDS, progress
from tests.training.worlds import PLAN

Found = list[dict[Any, Any]]
NAMES = list(STRATEGIES)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    with Ranks(4, replica_ranks.run, str(tmp_path_factory.mktemp("meet")), deadline_s=60) as four:
        return four.results()


def rounds(found: Found, name: str, size: int) -> list[dict[str, Any]]:
    return [found[rank]["rounds", name, size] for rank in range(size)]


def weighted_progress(size: int, turn: int, elements: int) -> np.ndarray:
    """Of each rank, by its rows over the ranks' mean: shape (size, elements)."""
    steps = range(turn * ROUND, (turn + 1) * ROUND)
    rows = [sum(PLAN.rank_rows(step, rank, size) for step in steps) for rank in range(size)]
    own = np.stack([progress(rank, turn, elements).astype(np.float64) for rank in range(size)])
    return own * (np.array(rows) / np.mean(rows))[:, None]


def test_rows_are_unequal_in_a_world_of_three() -> None:
    assert len({PLAN.rank_rows(0, rank, 3) for rank in range(3)}) == 2


@pytest.mark.parametrize("size", WORLDS)
def test_elastic_rounds_are_those_of_the_formula(found: Found, size: int) -> None:
    world = rounds(found, "elastic", size)
    center = world[0]["start"].astype(np.float64)
    replicas = np.stack([center] * size)
    for turn in range(ROUNDS):
        replicas = replicas + weighted_progress(size, turn, center.size)
        pull = BETA / size * (replicas - center)
        replicas, center = replicas - pull, center + pull.sum(0)
        for rank, one in enumerate(world):
            np.testing.assert_allclose(one["replicas"][turn], replicas[rank], atol=1e-5)
    np.testing.assert_allclose(world[0]["published"], center, atol=1e-5)


@pytest.mark.parametrize("size", WORLDS)
def test_what_replicas_give_the_center_takes(found: Found, size: int) -> None:
    world = rounds(found, "elastic", size)
    start = world[0]["start"].astype(np.float64)
    trained = sum(weighted_progress(size, turn, start.size).sum(0) for turn in range(ROUNDS))
    total = sum(one["replicas"][-1].astype(np.float64) for one in world) + world[0]["published"]
    np.testing.assert_allclose(total, (size + 1) * start + trained, atol=1e-5)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_gossip_rounds_are_those_of_the_matrix_and_keep_the_mean(found: Found, name: str, size: int) -> None:
    world = rounds(found, name, size)
    replicas = np.stack([one["start"].astype(np.float64) for one in world])
    mean = replicas.mean(0)
    for turn in range(ROUNDS):
        trained = weighted_progress(size, turn, mean.size)
        replicas, mean = mixing(name, size, turn) @ (replicas + trained), mean + trained.mean(0)
        seen = np.stack([one["replicas"][turn] for one in world])
        np.testing.assert_allclose(seen, replicas, atol=1e-5)
        np.testing.assert_allclose(seen.mean(0), mean, atol=1e-5)
    np.testing.assert_allclose(world[0]["published"], mean, atol=1e-5)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_publish_the_same_bits_and_their_distance_from_the_replicas(
    found: Found, name: str, size: int
) -> None:
    world = rounds(found, name, size)
    published = world[0]["published"]
    squares = [np.square(one["replicas"][-1] - published, dtype=np.float64).sum() for one in world]
    for one in world:
        np.testing.assert_array_equal(one["published"], published)
        assert one["metrics"] == world[0]["metrics"]
        assert one["metrics"]["consensus_distance"] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-5)
    if size == 4:
        assert np.mean(squares) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_follows_what_a_callback_changes_in_the_published_weights(found: Found, name: str) -> None:
    for one in rounds(found, name, 3):
        np.testing.assert_allclose(one["after a callback"], one["replicas"][-1] + 0.5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_on_another_number_of_workers_replicas_begin_at_the_published_weights(found: Found, name: str) -> None:
    for one in rounds(found, name, 3):
        np.testing.assert_array_equal(one["of another world"], one["published"])


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("strategy", ["elastic_averaging:every=4", "gossip:topology=ring"])
def test_an_epoch_lowers_the_loss_of_the_published_model(found: Found, strategy: str, size: int) -> None:
    for rank in range(size):
        before, after, history = found[rank][strategy, size]
        assert after < before
        assert history["val_loss"] == pytest.approx([after], rel=1e-4)  # it is the published model that is validated
        assert history["consensus_distance"] == found[0][strategy, size][2]["consensus_distance"]


@pytest.mark.parametrize("size", [2, 3])
def test_gossip_with_everybody_after_every_plain_step_is_a_synchronous_step(found: Found, size: int) -> None:
    assert_close(found[0]["mixed by all", size], found[0]["synchronous"])


def test_gossip_of_one_worker_is_plain_training(found: Found) -> None:
    for one, other in zip(found[0]["gossip alone"], found[0]["undisturbed"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("size", [2, 3])
def test_a_center_that_takes_everything_is_the_average_of_a_round(found: Found, size: int) -> None:
    assert_close(found[0]["center", size], found[0]["local", size])


@pytest.mark.parametrize("name", ["elastic", "exponential"])
def test_a_run_resumed_from_a_checkpoint_has_every_bit_of_the_undisturbed_one(found: Found, name: str) -> None:
    for rank in found[:3]:
        calm, again = rank["resumed", name]
        for part, arrays in calm.items():
            for one, other in zip(arrays, again[part], strict=True):
                np.testing.assert_array_equal(one, other, err_msg=part)
    states = [rank["resumed", name][0]["state"][0] for rank in found[:3]]
    assert np.abs(states[0] - states[1]).max() > 1e-6  # replicas do differ
    first = found[0]["resumed", name][0]["weights"]
    for rank in found[1:3]:
        for one, other in zip(first, rank["resumed", name][0]["weights"], strict=True):
            np.testing.assert_array_equal(one, other)


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
