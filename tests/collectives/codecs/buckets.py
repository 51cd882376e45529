"""Buckets and gradients for the codecs' tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dl_on_spark.collectives import Communicator
from dl_on_spark.collectives.codecs import Bucket, Compressor

FLOAT32 = np.dtype(np.float32)
SHAPES = ((7, 5), (5,), (3, 3, 2, 4), (), (1,))

shapes = st.lists(hnp.array_shapes(min_dims=0, max_dims=4, max_side=6), min_size=1, max_size=4).map(tuple)
magnitudes = st.floats(1e-6, 1e6)
dtypes = st.sampled_from([FLOAT32, np.dtype(np.float64)])


def bucket_of(shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: Any = FLOAT32, rank: int = 0) -> Bucket:
    return Bucket(shapes, np.dtype(dtype), rank=rank, seed=5)


@st.composite
def gradients(draw: st.DrawFn) -> tuple[Bucket, np.ndarray]:
    """A bucket and a gradient for it: many magnitudes, signs and zeros."""
    bucket = bucket_of(draw(shapes), draw(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(bucket.size) * draw(magnitudes)
    values *= rng.choice([0.0, 1e-3, 1.0, 30.0], bucket.size)
    return bucket, values.astype(bucket.dtype)


def alone() -> Communicator:
    return Communicator.connect(0, 1, "")


def reduced(compressor: Compressor, gradient: np.ndarray) -> np.ndarray:
    """One step in a world of one."""
    return compressor.reduce(gradient, alone())
