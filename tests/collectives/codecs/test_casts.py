"""fp16 and bf16: their relative error, their ends, and the values they hold exactly."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dl_on_spark.collectives.codecs import BF16, FP16
from dl_on_spark.collectives.codecs.payload import PayloadCodec
from tests.collectives.codecs.buckets import bucket_of

normal = st.floats(2.0**-14, 65504.0, width=32)
vectors = hnp.arrays(np.float32, st.integers(1, 50), elements=st.one_of(normal, normal.map(lambda x: -x)))


def through(codec: PayloadCodec, values: np.ndarray) -> np.ndarray:
    bucket = bucket_of((values.shape,), values.dtype)
    payload = codec.encode(values, bucket, bucket.rng(0))
    assert payload.nbytes == codec.payload_bytes(bucket)
    return codec.decode(payload, bucket)


@pytest.mark.parametrize(("codec", "bits"), [(FP16(), 11), (BF16(), 8)])
@given(values=vectors)
def test_the_relative_error_is_at_most_half_a_unit_in_the_last_place(
    codec: PayloadCodec, bits: int, values: np.ndarray
) -> None:
    assert np.all(np.abs(through(codec, values) - values) <= 2.0**-bits * np.abs(values))


@given(hnp.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_bf16_rounds_as_ml_dtypes_does(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
        expected = np.where(np.isfinite(values), np.clip(expected, -largest, largest), expected)
        np.testing.assert_array_equal(through(BF16(), values), expected)


def test_a_finite_value_beyond_the_range_is_sent_as_the_largest() -> None:
    values = np.array([1e6, -1e6, np.inf, -np.inf, 65504.0], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(through(FP16(), values), [65504.0, -65504.0, np.inf, -np.inf, 65504.0])
        np.testing.assert_array_equal(
            through(BF16(), np.array([3.4e38, -1e300, np.inf])), [3.3895313892515355e38, -3.3895313892515355e38, np.inf]
        )
