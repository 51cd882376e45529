"""int8, 1-bit, QSGD and TernGrad: error bounds, contraction, means and variances; and packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dl_on_spark.collectives.codecs import QSGD, Bucket, Int8, OneBit, TernGrad, parse_codec
from dl_on_spark.collectives.codecs.packing import in_chunks, pack, packed_bytes, unpack
from dl_on_spark.collectives.codecs.payload import PayloadCodec
from dl_on_spark.errors import ConfigError
from tests.collectives.codecs.buckets import FLOAT32, bucket_of, gradients

DRAWS = 4000


def through(codec: PayloadCodec, values: np.ndarray, bucket: Bucket, step: int = 0) -> np.ndarray:
    payload = codec.encode(values, bucket, bucket.rng(step))
    assert payload.nbytes == codec.payload_bytes(bucket)
    decoded = codec.decode(payload, bucket)
    assert (decoded.dtype, decoded.shape) == (values.dtype, values.shape)
    return decoded


@given(st.sampled_from([2, 4, 8]), st.integers(0, 40), st.integers(0, 2**32))
def test_packed_codes_are_unpacked(bits: int, size: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, size).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.nbytes == packed_bytes(size, bits)
    np.testing.assert_array_equal(unpack(packed, bits, size), codes)


@given(gradients(), st.sampled_from([1, 7, 1024]))
def test_int8_errs_by_half_a_step_of_its_chunk(drawn: tuple[Bucket, np.ndarray], chunk: int) -> None:
    bucket, values = drawn
    error = in_chunks(np.abs(through(Int8(chunk), values, bucket) - values), chunk)
    bound = np.abs(in_chunks(values, chunk)).max(axis=1) / 254
    assert np.all(error <= bound[:, None] * (1 + 1e-4))


@given(gradients())
def test_two_means_contract_by_at_least_what_the_scaled_sign_does(drawn: tuple[Bucket, np.ndarray]) -> None:
    bucket, values = drawn
    decoded = through(OneBit(), values, bucket)
    for shape, part, out in zip(bucket.shapes, bucket.split(values), bucket.split(decoded), strict=True):
        table = part.astype(float).reshape(-1, shape[-1] if len(shape) > 1 else 1)
        error = np.square(out.reshape(table.shape) - table).sum(axis=0)
        bound = np.square(table).sum(axis=0) - np.abs(table).sum(axis=0) ** 2 / len(table)
        assert np.all(error <= bound + 1e-5 * np.square(table).sum(axis=0))


def test_two_means_are_the_means_of_a_column() -> None:
    values = np.array([[1, -1], [3, -5], [-2, -6]], np.float32)
    decoded = through(OneBit(), values.reshape(-1), bucket_of(((3, 2),)))
    np.testing.assert_array_equal(decoded.reshape(3, 2), [[2, -4], [2, -4], [-2, -4]])


@pytest.mark.parametrize("codec", [QSGD(1), QSGD(4), QSGD(7, 16), QSGD(100), TernGrad()], ids=str)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_rounding_is_unbiased(codec: PayloadCodec, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(40)
    bucket = bucket_of(((5, 6), (10,)), np.float64)
    mean = np.zeros(values.size)
    for step in range(DRAWS):
        mean += through(codec, values, bucket, step) / DRAWS
    between = np.linalg.norm(values) / getattr(codec, "levels", 1)  # at most, from one level to the next
    assert np.all(np.abs(mean - values) <= 6 * between / 2 / np.sqrt(DRAWS))


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 127), st.integers(1, 100), st.integers(0, 2**32))
def test_qsgds_variance_is_within_its_bound(levels: int, size: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(size)
    bucket = bucket_of(((size,),), np.float64)
    errors = [np.square(through(QSGD(levels), values, bucket, step) - values).sum() for step in range(400)]
    bound = min(size / levels**2, np.sqrt(size) / levels) * np.square(values).sum()
    assert np.mean(errors) <= bound * 1.15 + 1e-9


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32))
def test_terngrads_variance_is_that_of_its_formula(seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(30)
    bucket = bucket_of(((30,),), np.float64)
    errors = [np.square(through(TernGrad(), values, bucket, step) - values).sum() for step in range(DRAWS)]
    expected = float((np.abs(values).max() * np.abs(values) - values**2).sum())
    assert abs(np.mean(errors) - expected) <= 6 * np.std(errors) / np.sqrt(DRAWS)


def test_terngrad_clips_at_so_many_deviations() -> None:
    values = np.array([*[1.0, -1.0] * 50, 100.0], np.float32)
    decoded = through(TernGrad(clip=2.5), values, bucket_of((values.shape,)))
    assert decoded.max() == pytest.approx(2.5 * values.std(), rel=1e-6)


@given(hnp.arrays(np.float32, 20, elements=st.floats(-1, 1, width=32)))
def test_draws_differ_between_ranks_and_steps_and_repeat_for_the_same(values: np.ndarray) -> None:
    values[:] = np.linspace(-1, 1, 20)
    bucket, other = bucket_of(((20,),)), bucket_of(((20,),), rank=1)
    first = through(QSGD(1), values, bucket, 3)
    np.testing.assert_array_equal(first, through(QSGD(1), values, bucket, 3))
    assert any(not np.array_equal(through(QSGD(1), values, bucket, step), first) for step in range(4, 12))
    assert any(
        not np.array_equal(through(QSGD(1), values, bucket, step), through(QSGD(1), values, other, step))
        for step in range(8)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("qsgd(0)", "levels=0"),
        ("qsgd(200)", "levels=200"),
        ("qsgd(4,0)", "chunk=0"),
        ("int8(1.5)", "chunk=1.5"),
        ("terngrad(-1)", "clip=-1"),
        ("qsgd(1,2,3)", r"Write qsgd\(levels, chunk\)"),
    ],
)
def test_a_wrong_option_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_codec(text)


def test_the_dtype_of_tiny_and_huge_values_survives() -> None:
    for codec in (Int8(), QSGD(), TernGrad(), OneBit()):
        for size in (1e-30, 1e30):
            values = np.array([size, -size, size / 2], FLOAT32)
            assert np.abs(through(codec, values, bucket_of(((3,),)))).max() <= size * 1.3
            assert np.abs(through(codec, values, bucket_of(((3,),)))).max() > 0 or codec == QSGD()
