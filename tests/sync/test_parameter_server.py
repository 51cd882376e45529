"""The parameter server: its clocks, its shards, and real workers that push, wait, fail, resume and agree."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.errors import ModelError
from dl_on_spark.sync import StepRows
from dl_on_spark.sync.clocks import Clocks
from dl_on_spark.sync.shard import Shard, check_optimizer
from dl_on_spark.sync.staleness import BINS, StalenessCounts
from tests.collectives.processes import Ranks
from tests.sync import server_ranks
from tests.sync.resuming import STEPS
from tests.sync.server_ranks import BOUNDS, STRATEGIES, TURNS
from tests.training.worlds import PLAN, alone, build

Found = list[dict[Any, Any]]


@given(st.integers(1, 5), st.none() | st.integers(0, 4), st.data())
def test_clocks_stay_within_the_bound_and_somebody_may_always_go_on(workers: int, bound: int | None, data: Any) -> None:
    clocks, free, waiting = Clocks(workers, bound), set(range(workers)), set()
    seen = [0] * workers
    for updates in range(60):
        worker = data.draw(st.sampled_from(sorted(free)))
        staleness = clocks.push(worker)
        assert staleness == (updates - seen[worker]) // workers
        assert bound is None or staleness <= 2 * bound
        free.remove(worker)
        waiting.add(worker)
        for one in clocks.release():
            waiting.remove(one)
            free.add(one)
            seen[one] = updates + 1
        at = [clocks.clock(w) for w in range(workers)]
        assert sum(at) == updates + 1
        assert all(bound is None or at[w] - min(at) <= bound for w in free)
        assert all(bound is not None and at[w] - min(at) == bound + 1 for w in waiting)  # no one waits in vain
        assert at[clocks.slowest()] == min(at)
        assert clocks.holds_back == bool(waiting)
        assert clocks.slowest() in free


@given(st.lists(st.integers(0, 300), min_size=1, max_size=50), st.lists(st.integers(0, 300), min_size=1, max_size=50))
def test_a_histogram_has_every_gradient_in_its_bin_and_goes_on_from_a_checkpoint(
    first: list[int], more: list[int]
) -> None:
    counts = StalenessCounts(alone())
    for staleness in first:
        counts.add(staleness)
    counts.agree(len(first))
    again = StalenessCounts(alone())
    again.load_state(counts.state())
    again.set_step(len(first))
    for staleness in more:
        again.add(staleness)
    again.agree(len(first) + len(more))
    found, seen = again.metrics(), first + more
    tops = [*BINS[1:], np.inf]
    for least, top in zip(BINS, tops, strict=True):
        assert found[f"staleness_{least}"] == sum(least <= staleness < top for staleness in seen)
    assert found["staleness_mean"] == pytest.approx(np.mean(seen))
    assert found["staleness_max"] == max(seen)


class Place:
    """A rank's place, where nobody exchanges."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def optimizers() -> dict[str, Any]:
    import keras

    of = keras.optimizers
    falling = of.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {
        "SGD": lambda: of.SGD(0.1),
        "SGD, momentum": lambda: of.SGD(0.1, momentum=0.9, nesterov=True),
        "SGD, schedule": lambda: of.SGD(falling, momentum=0.9),
        "SGD, loss scale": lambda: of.SGD(0.1, loss_scale_factor=8.0),
        "Adam": lambda: of.Adam(0.01),
        "Adam, amsgrad, clipvalue": lambda: of.Adam(0.01, amsgrad=True, clipvalue=0.02),
        "AdamW": lambda: of.AdamW(0.01, weight_decay=0.1),
        "RMSprop": lambda: of.RMSprop(0.01, momentum=0.5, centered=True),
        "Adagrad": lambda: of.Adagrad(0.05),
        "Adadelta": lambda: of.Adadelta(1.0),
        "Adamax": lambda: of.Adamax(0.01),
        "Nadam": lambda: of.Nadam(0.01),
        "Ftrl": lambda: of.Ftrl(0.05, l1_regularization_strength=0.001),
        "Lion": lambda: of.Lion(0.005),
    }


@pytest.mark.parametrize("name", list(optimizers()))
def test_a_shard_takes_the_steps_of_the_model_s_optimizer(name: str) -> None:
    model = build(optimizers()[name]())
    variables, optimizer = model.trainable_weights, model.optimizer
    optimizer.build(variables)
    random = np.random.default_rng(3)

    def step() -> np.ndarray:
        """One step of the model's; returns its flat gradient."""
        grads = [random.normal(size=v.shape).astype(np.float32) for v in variables]
        optimizer.apply(grads, variables)
        return np.concatenate([g.reshape(-1) for g in grads])

    for _ in range(3):  # state is not fresh when shards are cut
        step()
    shards = [Shard(model, Place(rank, 3), 1) for rank in range(3)]  # type: ignore[arg-type]
    for shard in shards:
        shard.cut()
    for _ in range(3):
        rate = float(optimizer.learning_rate)
        gradient = np.pad(step(), (0, 3 * shards[0].block - shards[0].size)).reshape(3, -1)
        after = [np.array(shard.apply(part, rate)) for shard, part in zip(shards, gradient, strict=True)]
    expected = np.concatenate([np.array(v).reshape(-1) for v in variables])
    np.testing.assert_allclose(np.concatenate(after)[: expected.size], expected, rtol=1e-6, atol=1e-6)


def test_joined_shards_are_the_optimizer_s_state_again() -> None:
    model = build(optimizers()["Nadam"]())
    model.optimizer.build(model.trainable_weights)
    for _ in range(2):
        model.optimizer.apply([np.ones(v.shape, np.float32) for v in model.trainable_weights])
    before = [np.array(v) for v in [*model.weights, *model.optimizer.variables]]
    shard = Shard(model, alone(), 1)
    shard.cut()
    for variable in [*model.weights, *model.optimizer.variables[2:]]:
        variable.assign(np.zeros(variable.shape))
    shard.join()
    for one, other in zip(before, [*model.weights, *model.optimizer.variables], strict=True):
        np.testing.assert_array_equal(one, other)


def refused() -> dict[str, Any]:
    import keras

    of = keras.optimizers

    class Own(of.Adam):
        pass

    def excluding() -> Any:
        optimizer = of.AdamW(0.01)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    return {
        "Lamb is not known": of.Lamb,
        "Adafactor is not known": of.Adafactor,
        "Muon is not known": of.Muon,
        "LossScaleOptimizer is not known": lambda: of.LossScaleOptimizer(of.SGD()),
        "Own is not known": Own,
        "whole weight \\(clipnorm\\)": lambda: of.SGD(clipnorm=1.0),
        "all gradients \\(global_clipnorm\\)": lambda: of.Adam(global_clipnorm=1.0),
        "use_ema": lambda: of.SGD(use_ema=True),
        "gradient_accumulation_steps": lambda: of.SGD(gradient_accumulation_steps=2),
        "exclude_from_weight_decay": excluding,
    }


@pytest.mark.parametrize("said", list(refused()))
def test_what_a_shard_cannot_update_is_refused_by_name(said: str) -> None:
    model = build(refused()[said]())
    for strategy in STRATEGIES.values():
        with pytest.raises(ModelError, match=said) as caught:
            strategy.start(model, alone(), StepRows(PLAN, 0, 1))
        assert "allreduce" in str(caught.value.fix)


def test_constraints_of_whole_weights_are_refused() -> None:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_constraint="unit_norm")])
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match="constraints"):
        check_optimizer(model)


@pytest.fixture(scope="module")
def served() -> Found:
    with Ranks(3, server_ranks.served, 5, deadline_s=60) as three:
        return three.results()


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("bound", BOUNDS)
def test_no_worker_begins_a_step_before_all_have_ended_those_that_the_bound_asks_for(
    served: Found, bound: int | None, turn: int
) -> None:
    ranks = [one[bound, turn] for one in served]
    ahead = 0
    for began, _, staleness, total in ranks:
        for step, start in enumerate(began):
            done = [sum(end <= start for end in ended) for _, ended, _, _ in ranks]
            ahead = max(ahead, step - min(done))
        assert bound is None or max(staleness) <= 2 * bound
        np.testing.assert_array_equal(total, np.full(server_ranks.BLOCK, 3.0 * TURNS))  # nothing lost, nothing twice
    assert bound is None or ahead <= bound
    assert bound != 5 or ahead > 1  # they do run ahead


def test_without_a_bound_workers_go_on_while_one_has_not_begun() -> None:
    with Ranks(3, server_ranks.one_is_slow, None) as three:
        three.wait_ready()
        for rank in (1, 2):
            for turn in range(TURNS):
                assert three.read(rank) == ("stepped", turn)
        three.pipes[0].send("go on")
        (slow, most), *others = three.results()
    assert most == 2 * TURNS // 3  # its first gradient: all that the others did came between
    for total, _ in [(slow, most), *others]:
        np.testing.assert_array_equal(total, np.full(server_ranks.BLOCK, 3.0 * TURNS))


def test_with_a_bound_workers_wait_for_one_that_has_not_begun() -> None:
    with Ranks(2, server_ranks.one_is_slow, 2) as two:
        two.wait_ready()
        for turn in range(2):
            assert two.read(1) == ("stepped", turn)
        assert not two.pipes[1].poll(0.5)  # the third step's weights do not come
        two.pipes[0].send("go on")
        assert two.read(1) == ("stepped", 2)
        two.results()


@pytest.mark.faults
@pytest.mark.parametrize("bound", [1, None])
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("dies", "CollectiveError", "rank 1 died"),
        ("raises", "CollectiveError", "rank 1 failed: RuntimeError: broken on purpose"),
        ("stops", "DeadlineExceeded", "rank 1 did not answer within 4 s"),
    ],
)
def test_a_worker_that_ends_or_stops_is_named_by_all_others(bound: int | None, how: str, kind: str, said: str) -> None:
    with Ranks(3, server_ranks.one_fails, bound, how, deadline_s=4 if how == "stops" else 100) as three:
        three.wait_ready()
        began = time.monotonic()
        for rank in (0, 2):
            outcome, (error, text) = three.outcome(rank)
            assert (outcome, error) == ("error", kind), text
            assert said in text
        assert time.monotonic() - began < 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = str(tmp_path_factory.mktemp("meet"))
    with Ranks(3, server_ranks.trained, folder, before=server_ranks.one_thread, deadline_s=60) as three:
        return three.results()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_without_staleness_weights_and_state_are_those_of_allreduce(trained: Found, optimizer: str, size: int) -> None:
    assert len({PLAN.rank_rows(STEPS - 1, rank, 3) for rank in range(3)}) > 1  # batches are unequal
    expected = trained[0]["allreduce", optimizer]
    for rank in trained[:size]:
        for actual, wanted in zip(rank[optimizer, size], expected, strict=True):
            for one, other in zip(actual, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "size"), [("synchronous", 3), ("bounded", 1), ("bounded", 3), ("unbounded", 3)])
def test_epochs_lower_the_loss_and_all_ranks_end_with_the_same_bits(trained: Found, name: str, size: int) -> None:
    for rank in trained[:size]:
        before, after, history, metrics, weights = rank[name, size]
        assert after < before
        assert history["val_loss"][-1] == pytest.approx(after, rel=1e-4)  # what is published is validated
        for one, other in zip(weights, trained[0][name, size][4], strict=True):
            np.testing.assert_array_equal(one, other)
        for epoch in range(2):
            gradients = sum(history[f"staleness_{least}"][epoch] for least in BINS)
            assert gradients == size * STEPS * (epoch + 1)
        assert {key: values[-1] for key, values in history.items() if key in metrics} == metrics
        assert metrics == trained[0][name, size][3]
        if name == "bounded":
            assert metrics["staleness_max"] <= 4
        if name == "synchronous":
            assert metrics["staleness_0"] == size * 2 * STEPS


def test_a_synchronous_run_resumed_from_a_checkpoint_has_every_bit_of_the_undisturbed_one(trained: Found) -> None:
    for rank in trained[:2]:
        calm, again = rank["resumed", "synchronous"]
        for part in ("weights", "optimizer"):
            for one, other in zip(calm[part], again[part], strict=True):
                np.testing.assert_array_equal(one, other)


def test_an_asynchronous_run_resumed_from_a_checkpoint_counts_every_gradient_once(trained: Found) -> None:
    for run in (0, 1):
        found = [rank["resumed", "unbounded"][run] for rank in trained[:2]]
        for part in ("weights", "optimizer"):
            for one, other in zip(*(of[part] for of in found), strict=True):
                np.testing.assert_array_equal(one, other)
        history = found[0]["history"]
        assert sum(history[f"staleness_{least}"][-1] for least in BINS) == 2 * 3 * STEPS
        assert found[0]["optimizer"][0] == 3 * STEPS  # iterations are steps


def test_gradients_of_some_weights_only_are_refused(trained: Found) -> None:
    for rank in trained[:2]:
        kind, text = rank["refused"]
        assert kind == "ModelError"
        assert "gradients of 2 weights" in text


@pytest.mark.faults
@pytest.mark.parametrize("staleness", [0, 1, None])
def test_a_worker_killed_in_training_is_named_by_the_others(staleness: int | None) -> None:
    with Ranks(3, server_ranks.killed_while_training, staleness, deadline_s=100) as three:
        for rank in (0, 2):
            outcome, (error, text) = three.outcome(rank)
            assert (outcome, error) == ("error", "CollectiveError"), text
            assert "rank 1 died" in text or "rank 1 was lost" in text
