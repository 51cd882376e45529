"""What holds for every codec: its text, its residual, its state, its way with values that are no numbers."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl_on_spark.collectives.codecs import CODECS, DGC, Bucket, Codec, Compressor, parse_codec
from dl_on_spark.errors import ConfigError
from tests.cluster import REPOSITORY
from tests.collectives.codecs.buckets import bucket_of, gradients, reduced

every = pytest.mark.parametrize("name", CODECS)


@every
def test_the_text_of_a_codec_names_exactly_that_codec(name: str) -> None:
    codec = parse_codec(name)
    assert str(codec) == name
    assert codec == CODECS[name]()
    assert parse_codec(codec) is codec


@pytest.mark.parametrize(
    ("text", "said"),
    [("fp61", "Did you mean 'fp16'"), ("zip9000", "Known: fp16"), ("bf16(3)", "Write bf16 alone"), ("fp16(", "fp16")],
)
def test_a_wrong_text_is_refused_with_the_way_out(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_codec(text)
    assert said in str(caught.value)
    assert caught.value.fix


@every
@settings(max_examples=25, deadline=None)
@given(gradients(), st.integers(1, 6))
def test_what_went_in_is_what_came_out_and_what_the_residual_holds(
    name: str, drawn: tuple[Bucket, np.ndarray], steps: int
) -> None:
    bucket, gradient = drawn
    compressor = Compressor(conserving(name), bucket)
    if "residual" not in compressor.state():
        return
    rng = np.random.default_rng(0)
    came_in, came_out = np.zeros(bucket.size), np.zeros(bucket.size)
    for _ in range(steps):
        step = (gradient * rng.standard_normal(bucket.size)).astype(bucket.dtype)
        came_in += step
        came_out += reduced(compressor, step)
    size = float(np.abs(gradient).max()) * steps
    tolerance = 50 * float(np.finfo(bucket.dtype).eps) * size + 1e-30
    np.testing.assert_allclose(came_out + compressor.state()["residual"], came_in, rtol=0, atol=tolerance)


@every
def test_a_value_that_is_no_number_reaches_the_sum_and_leaves_the_state_as_it_was(name: str) -> None:
    bucket = bucket_of()
    compressor = Compressor(CODECS[name](), bucket)
    rng = np.random.default_rng(1)
    for _ in range(3):
        reduced(compressor, rng.standard_normal(bucket.size).astype(np.float32))
    before = {key: value.copy() for key, value in compressor.state().items() if key != "shared_step"}
    for bad, place in itertools.product([np.nan, np.inf, -np.inf], [0, 37, bucket.size - 1]):
        gradient = rng.standard_normal(bucket.size).astype(np.float32)
        gradient[place] = bad
        assert not np.isfinite(reduced(compressor, gradient)).all()
        after = compressor.state()
        for key, value in before.items():
            np.testing.assert_array_equal(after[key], value)


@every
@settings(max_examples=10, deadline=None)
@given(gradients(), st.integers(0, 3))
def test_a_compressor_goes_on_from_its_state_bit_for_bit(
    name: str, drawn: tuple[Bucket, np.ndarray], steps: int
) -> None:
    bucket, gradient = drawn
    first = Compressor(CODECS[name](), bucket)
    for _ in range(steps):
        reduced(first, gradient)
    second = Compressor(CODECS[name](), bucket)
    second.load_state(first.state())
    for _ in range(2):
        np.testing.assert_array_equal(reduced(first, gradient), reduced(second, gradient))


@every
def test_what_a_state_lacks_begins_anew(name: str) -> None:
    bucket = bucket_of()
    first, second = Compressor(CODECS[name](), bucket), Compressor(CODECS[name](), bucket)
    reduced(first, np.linspace(-1, 1, bucket.size, dtype=np.float32) ** 3)
    fresh = second.state()
    second.load_state({key: value for key, value in first.state().items() if key.startswith("shared_")})
    for key, value in second.state().items():
        np.testing.assert_array_equal(value, (first.state() if key.startswith("shared_") else fresh)[key])


@every
def test_zeros_and_empty_buckets_come_out_as_they_went_in(name: str) -> None:
    for bucket in (bucket_of(), bucket_of(((0, 3),))):
        compressor = Compressor(CODECS[name](), bucket)
        for _ in range(3):
            np.testing.assert_array_equal(reduced(compressor, np.zeros(bucket.size, np.float32)), 0)


def test_the_documentation_has_a_row_for_every_codec_with_its_options_and_its_code_runs() -> None:
    text = (REPOSITORY / "docs" / "compression.md").read_text(encoding="utf-8")
    for name, kind in CODECS.items():
        row = re.search(rf"^\| `{name}` \|(.*?)\|", text, re.MULTILINE)
        assert row is not None, name
        for option in dataclasses.fields(kind):  # type: ignore[arg-type]
            default = "none" if option.default is None else str(option.default)
            assert re.search(rf"{option.name}( \w)? \({default}\)", row[1]), (name, option.name)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, {})


def conserving(name: str) -> Codec:
    """The codec with its default options, without momentum."""
    return DGC(momentum=0.0) if name == "dgc" else CODECS[name]()
