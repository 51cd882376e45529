"""PowerSGD: exact where the rank allows it, linear, a projection that finds the greatest directions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.collectives.codecs import Compressor, PowerSGD
from dl_on_spark.collectives.codecs.low_rank import expand, folded_sum, orthonormal
from tests.collectives.codecs.buckets import bucket_of, reduced

seeds = st.integers(0, 2**32)
sides = st.integers(6, 20)


@given(st.integers(0, 40), st.integers(1, 4), seeds)
def test_a_folded_sum_is_the_sum(rows: int, columns: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, columns))
    kept = values.copy()
    np.testing.assert_allclose(folded_sum(values), values.sum(axis=0), atol=1e-12)
    np.testing.assert_array_equal(values, kept)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 4), seeds, st.sampled_from([np.float32, np.float64]))
def test_columns_become_orthonormal_or_zero(rows: int, columns: int, dependent: int, seed: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-15, 15)
    matrix[:, : min(dependent, columns)] = matrix[:, [0]] * rng.standard_normal(min(dependent, columns))
    p = orthonormal(matrix.astype(dtype)).astype(float)
    gram = p.T @ p
    kept = np.diag(gram) > 0.5
    np.testing.assert_allclose(gram, np.diag(kept.astype(float)), atol=3e-6 if dtype is np.float32 else 1e-13)
    scale = np.abs(matrix).max()
    np.testing.assert_allclose(p @ (p.T @ matrix) / scale, matrix / scale, atol=2e-4 if dtype is np.float32 else 1e-11)


def test_a_product_is_the_matrix_product() -> None:
    rng = np.random.default_rng(1)
    left, right, out = rng.standard_normal((5, 3)), rng.standard_normal((4, 3)), np.ones((5, 4))
    expand(left, right, out)
    np.testing.assert_allclose(out, left @ right.T)


@settings(deadline=None)
@given(sides, sides, st.integers(1, 2), seeds)
def test_a_matrix_of_that_rank_comes_out_whole_at_once(n: int, m: int, rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = (rng.standard_normal((n, rank)) @ rng.standard_normal((rank, m))).reshape(-1)
    bucket = bucket_of(((n, m),), np.float64)
    compressor = Compressor(PowerSGD(2), bucket)
    np.testing.assert_allclose(reduced(compressor, matrix), matrix, atol=1e-8 * np.abs(matrix).max())
    # A direction that was not there is found when it comes.
    other = (rng.standard_normal((n, 2)) @ rng.standard_normal((2, m))).reshape(-1)
    np.testing.assert_allclose(reduced(compressor, other), other, atol=1e-6 * np.abs(other).max())


@given(st.integers(1, 6), st.integers(1, 6), seeds)
def test_at_full_rank_the_gradient_comes_out_bit_for_bit(n: int, m: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(n * m).astype(np.float32)
    compressor = Compressor(PowerSGD(min(n, m)), bucket_of(((n, m),)))
    np.testing.assert_array_equal(reduced(compressor, values), values)


@settings(deadline=None)
@given(sides, sides, seeds)
def test_what_is_sent_is_a_projection_and_the_residual_the_rest(n: int, m: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(n * m)
    compressor = Compressor(PowerSGD(2), bucket_of(((n, m),), np.float64))
    sent = reduced(compressor, values)
    residual = compressor.state()["residual"]
    assert np.linalg.matrix_rank(sent.reshape(n, m)) <= 2
    np.testing.assert_allclose(sent @ residual, 0, atol=1e-9 * (values @ values))
    np.testing.assert_allclose(sent @ sent + residual @ residual, values @ values, rtol=1e-9)


def test_a_warm_start_finds_the_best_approximation() -> None:
    rng = np.random.default_rng(4)
    u, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    w, _ = np.linalg.qr(rng.standard_normal((12, 12)))
    matrix = (u[:, :12] * 0.5 ** np.arange(12)) @ w.T
    bucket = bucket_of(((20, 12),), np.float64)
    codec, state = PowerSGD(2), PowerSGD(2).start(bucket)
    from tests.collectives.codecs.buckets import alone

    for step in range(30):
        sent, state = codec.reduce(matrix.reshape(-1), {**state, "residual": np.zeros(240)}, step, bucket, alone())
    best = np.sqrt(np.square(0.5 ** np.arange(2, 12)).sum())
    assert np.linalg.norm(sent.reshape(20, 12) - matrix) < best * 1.0001


def test_vectors_and_small_matrices_are_not_compressed() -> None:
    bucket = bucket_of(((30, 20), (7,), (2, 3), ()))
    values = np.random.default_rng(0).standard_normal(bucket.size).astype(np.float32)
    sent = reduced(Compressor(PowerSGD(2), bucket), values)
    np.testing.assert_array_equal(sent[600:], values[600:])
    assert PowerSGD(2).bytes_sent(bucket, 2) == 4 * (2 * 50 + 7 + 6 + 1)
