"""Strategies as values: their text, their limits, their formulas. No TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dl_on_spark.collectives.codecs import CODECS, DGC, QSGD, PowerSGD, TernGrad, TopK
from dl_on_spark.errors import ConfigError
from dl_on_spark.sync import (
    Allreduce,
    ElasticAveraging,
    Gossip,
    LocalSGD,
    Momentum,
    Nesterov,
    ParameterServer,
    Quadratic,
    Stepped,
    SyncStrategy,
    parse_sync,
)
from dl_on_spark.sync.gossip import TOPOLOGIES
from tests.sync.mixing import mixing

rates = st.floats(1e-6, 10, allow_nan=False)
momenta = st.floats(0, 1, exclude_max=True)
outers = st.none() | st.builds(Momentum, rates, momenta) | st.builds(Nesterov, rates, momenta)
counts = st.integers(1, 10**6)
later = st.lists(st.tuples(counts, counts), unique_by=lambda piece: piece[0]).map(sorted)
schedules = st.builds(lambda first, more: Stepped(((0, first), *more)), counts, later) | st.builds(
    Quadratic, counts, rates
)
local = st.builds(LocalSGD, every=counts | schedules, outer=outers, start_at=st.integers(0, 10**6))
elastic = st.builds(ElasticAveraging, st.none() | st.floats(1e-6, 1), st.integers(1, 10**6))
gossip = st.builds(Gossip, st.sampled_from(sorted(TOPOLOGIES)), st.integers(1, 10**6))
server = st.builds(ParameterServer, st.none() | st.integers(0, 10**6), st.booleans())


fractions = st.floats(1e-6, 1)
codecs = (
    st.sampled_from([None, *CODECS])
    | st.builds(TopK, fractions)
    | st.builds(DGC, fractions, momenta, st.none() | rates, st.integers(0, 10**6))
    | st.builds(QSGD, st.integers(1, 127), st.integers(1, 10**6))
    | st.builds(TernGrad, st.none() | rates)
    | st.builds(PowerSGD, st.integers(1, 64))
)


@given(
    local
    | elastic
    | gossip
    | server
    | st.builds(Allreduce, noise_scale=st.booleans())
    | st.builds(Allreduce, bucket_mb=st.just(25.0) | st.floats(1e-6, 1e6), compress=codecs)
)
def test_the_text_of_a_strategy_names_exactly_that_strategy(strategy: SyncStrategy) -> None:
    assert parse_sync(str(strategy)) == strategy
    assert parse_sync(strategy) is strategy


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("allreduce", Allreduce()),
        (" local_sgd ", LocalSGD()),
        ("allreduce:compress=none", Allreduce()),
        ("allreduce:compress=fp16", Allreduce(compress=CODECS["fp16"]())),
        ("allreduce:noise_scale=true", Allreduce(noise_scale=True)),
        ("allreduce:noise_scale=false", Allreduce()),
        ("allreduce:compress=topk", Allreduce(compress=TopK(0.01))),
        ("allreduce:bucket_mb=4,compress=dgc(0.01, 0.9)", Allreduce(bucket_mb=4, compress=DGC(0.01, 0.9))),
        ("local_sgd:every=16, outer=nesterov", LocalSGD(every=16, outer=Nesterov(0.7, 0.9))),
        ("local_sgd:outer=momentum(1, 0.5),start_at=3", LocalSGD(outer=Momentum(1.0, 0.5), start_at=3)),
        ("local_sgd:outer=none", LocalSGD()),
        ("local_sgd:every=stepped(0:4, 1000:16)", LocalSGD(every=Stepped(((0, 4), (1000, 16))))),
        ("local_sgd:every=quadratic(2,0.1),start_at=3", LocalSGD(every=Quadratic(2, 0.1), start_at=3)),
        ("elastic_averaging", ElasticAveraging()),
        ("elastic_averaging:alpha=0.5,every=4", ElasticAveraging(alpha=0.5, every=4)),
        ("gossip:topology=ring", Gossip()),
        ("gossip:topology=exponential, every=2", Gossip("exponential", every=2)),
        ("parameter_server", ParameterServer()),
        ("parameter_server:staleness=4", ParameterServer(4)),
        ("parameter_server:staleness=inf, scale_by_staleness=true", ParameterServer(None, True)),
        ("parameter_server:staleness=unbounded,scale_by_staleness=False", ParameterServer(None)),
    ],
)
def test_a_text_is_read(text: str, strategy: SyncStrategy) -> None:
    assert parse_sync(text) == strategy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("allreduse", "Did you mean 'allreduce'"),
        ("local_sgd:evry=3", "Did you mean 'every'"),
        ("local_sgd:every=0", "every=0"),
        ("local_sgd:every=1.5", "every=1.5"),
        ("local_sgd:every", "is not option=value"),
        ("local_sgd:every=often", "every=often is not a number"),
        ("local_sgd:start_at=-1", "start_at=-1"),
        ("local_sgd:outer=adam(0.1)", "'adam' is unknown"),
        ("local_sgd:outer=nesterov(0.7,1.5)", "momentum from 0 to below 1"),
        ("local_sgd:outer=momentum(0)", "learning rate above 0"),
        ("allreduce:compress=fp61", "Did you mean 'fp16'"),
        ("allreduce:compress=topk(0)", "fraction=0"),
        ("allreduce:compress=topk(few)", r"Write topk\(fraction\)"),
        ("local_sgd:every=cosine(3)", "'cosine' is unknown"),
        ("local_sgd:every=stepped(4)", "stepped\\(4\\)"),
        ("local_sgd:every=stepped(1:4)", "stepped\\(1:4\\)"),
        ("local_sgd:every=stepped(0:4,0:5)", "stepped\\(0:4,0:5\\)"),
        ("local_sgd:every=stepped(0:0)", "stepped\\(0:0\\)"),
        ("local_sgd:every=quadratic(1.5)", "quadratic\\(1.5\\)"),
        ("local_sgd:every=quadratic(4,-1)", "quadratic\\(4,-1.0\\)"),
        ("elastic_averaging:alpha=0", "alpha=0"),
        ("elastic_averaging:alpha=1.5", "alpha=1.5"),
        ("elastic_averaging:alpha=much", "alpha=much is not a number"),
        ("elastic_averaging:every=0", "every=0"),
        ("gossip:topology=star", "'star' is unknown"),
        ("gossip:topology=1", "'1' is unknown"),
        ("gossip:every=0.5", "every=0.5"),
        ("parameter_server:staleness=-1", "staleness=-1"),
        ("parameter_server:staleness=1.5", "staleness=1.5"),
        ("parameter_server:staleness=nan", "staleness=nan"),
        ("parameter_server:staleness=much", "staleness=much is not a number"),
        ("parameter_server:scale_by_staleness=2", "scale_by_staleness=2"),
        ("parameter_server:stalenes=2", "Did you mean 'staleness'"),
        ("allreduce:bucket_mb=0", "bucket_mb=0"),
        ("allreduce:noise_scale=1", "noise_scale=1"),
        ("allreduce:noise_scale=true,compress=fp16", "noise_scale with compress=fp16"),
        ("local_sgd:every=true", "every=true is not a number"),
        ("allreduce:bucket_mb=nan", "bucket_mb=nan"),
    ],
)
def test_a_wrong_text_is_refused_with_the_way_out(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_sync(text)
    assert caught.value.fix


@given(st.sampled_from(sorted(TOPOLOGIES)), st.integers(1, 64), st.integers(0, 100))
def test_mixing_is_doubly_stochastic(topology: str, world_size: int, turn: int) -> None:
    matrix = mixing(topology, world_size, turn)
    assert (matrix >= 0).all()
    assert (np.diag(matrix) > 0).all()
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix.sum(1), 1)
    if topology == "ring":
        np.testing.assert_array_equal(matrix, matrix.T)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_one_peer_rounds_of_the_exponential_graph_make_the_exact_mean(world_size: int) -> None:
    product = np.eye(world_size)
    for turn in range(world_size.bit_length() - 1):
        product = mixing("exponential", world_size, turn) @ product
    np.testing.assert_array_equal(product, np.full((world_size, world_size), 1 / world_size))


@given(st.sampled_from(sorted(TOPOLOGIES)), st.integers(2, 16))
def test_replicas_that_only_mix_come_together(topology: str, world_size: int) -> None:
    replicas = np.arange(world_size, dtype=float)
    for turn in range(30 * world_size):
        replicas = mixing(topology, world_size, turn) @ replicas
    np.testing.assert_allclose(replicas, (world_size - 1) / 2, rtol=1e-3)


def test_rounds_grow_by_schedule() -> None:
    stepped = Stepped(((0, 4), (10, 16)))
    assert [stepped.every(step, 0.1) for step in (0, 9, 10, 99)] == [4, 4, 16, 16]
    quadratic = Quadratic(4, 0.02)
    assert [quadratic.every(0, rate) for rate in (0.1, 0.01, 0.005, 0.001)] == [4, 4, 16, 400]
    assert quadratic.every(0, 0.0) == 4


def test_a_center_never_goes_beyond_the_replicas_mean() -> None:
    ElasticAveraging(alpha=0.5).check(2)
    ElasticAveraging().check(100)
    with pytest.raises(ConfigError, match="with 3 workers") as caught:
        ElasticAveraging(alpha=0.5).check(3)
    assert "alpha=0.3" in str(caught.value.fix)


@pytest.mark.parametrize("outer", [Momentum(0.9, 0.5), Nesterov(0.7, 0.9)])
def test_an_outer_step_goes_towards_the_mean_of_the_replicas(outer: Any) -> None:
    start, mean = np.float64([1.0, -2.0]), np.float64([0.5, 0.0])
    step = outer.apply(start - mean, np.zeros(2))
    assert np.all(np.sign(-step) == np.sign(mean - start))


def test_strategies_are_made_without_tensorflow() -> None:
    code = "import sys, dl_on_spark.sync as s; s.Allreduce(); sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
