"""Top-k, threshold and DGC: what is chosen, what stays, what the paper's formulas give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.collectives.codecs import DGC, Bucket, Compressor, Threshold, TopK, parse_codec
from dl_on_spark.collectives.codecs.topk import count_of, largest
from dl_on_spark.errors import ConfigError, ModelError
from tests.collectives.codecs.buckets import bucket_of, gradients, reduced

fractions = st.floats(1e-4, 1.0)


@given(gradients(), fractions)
def test_top_k_contracts_by_the_fraction_it_sends(drawn: tuple[Bucket, np.ndarray], fraction: float) -> None:
    bucket, values = drawn
    compressor = Compressor(TopK(fraction), bucket)
    sent = reduced(compressor, values)
    k = count_of(fraction, bucket.size)
    assert np.count_nonzero(sent) <= k
    wide = values.astype(float)
    left = np.square(compressor.state()["residual"].astype(float)).sum()
    assert left <= (1 - k / bucket.size) * np.square(wide).sum() + 1e-12 * np.square(wide).sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30_000), fractions, st.integers(0, 2**32), st.booleans())
def test_the_greatest_are_chosen_whatever_the_sample_says(size: int, fraction: float, seed: int, ordered: bool) -> None:
    magnitudes = np.abs(np.random.default_rng(seed).standard_normal(size)).astype(np.float32)
    if ordered:  # a sample that misleads
        magnitudes.sort()
        magnitudes[::64] *= 0.01
    count = count_of(fraction, size)
    chosen = largest(magnitudes, count)
    np.testing.assert_array_equal(chosen, np.unique(chosen))
    np.testing.assert_array_equal(np.sort(magnitudes[chosen]), np.sort(magnitudes)[size - count :])


@given(gradients(), st.floats(1e-6, 1e6), st.integers(1, 4))
def test_no_residual_reaches_the_threshold(drawn: tuple[Bucket, np.ndarray], threshold: float, steps: int) -> None:
    bucket, values = drawn
    compressor = Compressor(Threshold(threshold), bucket)
    for _ in range(steps):
        sent = reduced(compressor, values)
        rounding = 2.0**-24 * np.abs(sent)  # of float64 to the float32 that travels
        assert np.all(np.abs(compressor.state()["residual"]) < threshold + rounding)
        assert np.all((sent == 0) | (np.abs(sent) >= threshold * (1 - 1e-6)))


@given(gradients(), st.floats(0, 0.99), st.integers(1, 5))
def test_dgc_takes_the_steps_of_the_papers_algorithm(
    drawn: tuple[Bucket, np.ndarray], momentum: float, steps: int
) -> None:
    bucket, values = drawn
    values = values / max(1.0, float(np.abs(values).max()))
    compressor = Compressor(DGC(0.2, momentum), bucket)
    u, v = np.zeros(bucket.size), np.zeros(bucket.size)
    for _ in range(steps):
        out = reduced(compressor, values.astype(bucket.dtype))
        sent = out != 0
        assert np.count_nonzero(sent) <= count_of(0.2, bucket.size)
        u = momentum * u + values
        v = v + u
        np.testing.assert_allclose(out[sent], v[sent], rtol=1e-4, atol=1e-6)
        # What stayed is nowhere greater than what went.
        if 0 < np.count_nonzero(sent) == count_of(0.2, bucket.size):
            assert np.abs(v[~sent]).max(initial=0) <= np.abs(v[sent]).min() * (1 + 1e-4) + 1e-6
        u[sent] = v[sent] = 0
        np.testing.assert_allclose(compressor.state()["momentum"], u, rtol=1e-4, atol=1e-6)


def test_dgc_cuts_the_gradients_norm() -> None:
    bucket = bucket_of(((4,),))
    sent = reduced(Compressor(DGC(1.0, 0.0, clip=2.0), bucket), np.full(4, 3.0, np.float32))
    np.testing.assert_allclose(sent, 1.0)
    sent = reduced(Compressor(DGC(1.0, 0.0, clip=2.0), bucket), np.full(4, 0.5, np.float32))
    np.testing.assert_array_equal(sent, 0.5)


def test_sparsity_warms_up_as_in_the_paper() -> None:
    codec = DGC(0.001, warm_up=8)
    assert [codec.fraction_at(step) for step in range(10)] == [
        *[0.25] * 2, *[0.0625] * 2, *[0.015625] * 2, *[0.00390625] * 2, 0.001, 0.001,
    ]  # fmt: skip
    assert DGC(0.5, warm_up=10).fraction_at(0) == 0.5
    assert DGC(0.0625, warm_up=10).fraction_at(9) == 0.25
    assert DGC(0.0625, warm_up=10).fraction_at(10) == 0.0625


@given(st.floats(1e-6, 1.0), st.integers(0, 50))
def test_a_warm_up_never_sends_less_than_the_end(fraction: float, warm_up: int) -> None:
    sent = [DGC(fraction, warm_up=warm_up).fraction_at(step) for step in range(60)]
    assert sent == sorted(sent, reverse=True)
    assert min(sent) == sent[-1] == fraction


def test_momentum_is_not_applied_twice() -> None:
    import keras

    for optimizer in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam()):
        with pytest.raises(ModelError, match=r"SGD\(momentum=0\)"):
            DGC().check_optimizer(optimizer)
        DGC(momentum=0.0).check_optimizer(optimizer)
    DGC().check_optimizer(keras.optimizers.SGD(0.1))
    DGC().check_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk(0)", "fraction=0"),
        ("topk(1.5)", "fraction=1.5"),
        ("threshold(0)", "threshold=0"),
        ("dgc(0.1,1)", "momentum=1"),
        ("dgc(0.1,0.9,0)", "clip=0"),
        ("dgc(0.1,0.9,none,2.5)", "warm_up=2.5"),
        ("topk(few)", "could not convert"),
    ],
)
def test_a_wrong_option_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_codec(text)
