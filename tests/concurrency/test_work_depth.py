"""Work and depth: exact on models whose counts are published, equal to TensorFlow's own count on random ones."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers as kl

from dl_on_spark.concurrency import work_of
from dl_on_spark.concurrency.layers import lg, wavefront


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        ("VGG16", 138_357_544, 15_470_264_320),
        ("VGG19", 143_667_240, 19_632_062_464),
        ("ResNet50", 25_636_712, 3_857_973_248),
        ("ResNet152", 60_419_944, 11_282_415_616),
        ("DenseNet121", 8_062_504, 2_834_161_664),
    ],
)
def test_counts_of_published_models(name: str, parameters: int, macs: int) -> None:
    found = work_of(getattr(keras.applications, name)(weights=None))
    assert (found.parameters, found.macs, found.unknown, found.graph) == (parameters, macs, (), True)
    keras.backend.clear_session()


def _lenet5() -> Any:
    conv = [kl.Conv2D(6, 5, padding="same"), kl.AveragePooling2D(2), kl.Conv2D(16, 5), kl.MaxPooling2D(2)]
    dense = [kl.Flatten(), kl.Dense(120), kl.Dense(84), kl.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((28, 28, 1)), *conv, *dense])


def _alexnet(groups: int, size: int, widths: tuple[int, ...], padding: str) -> Any:
    a, b, c, d, e = widths
    return keras.Sequential(
        [
            keras.Input((size, size, 3)),
            *([kl.ZeroPadding2D(2)] if padding == "torch" else []),
            kl.Conv2D(a, 11, 4, activation="relu"),
            kl.MaxPooling2D(3, 2),
            kl.Conv2D(b, 5, padding="same", groups=groups, activation="relu"),
            kl.MaxPooling2D(3, 2),
            kl.Conv2D(c, 3, padding="same", activation="relu"),
            kl.Conv2D(d, 3, padding="same", groups=groups, activation="relu"),
            kl.Conv2D(e, 3, padding="same", groups=groups, activation="relu"),
            kl.MaxPooling2D(3, 2),
            kl.Flatten(),
            kl.Dense(4096, activation="relu"),
            kl.Dense(4096, activation="relu"),
            kl.Dense(1000, activation="softmax"),
        ]
    )


@pytest.mark.parametrize(
    ("model", "parameters", "macs"),
    [
        (_lenet5, 61_706, 416_520),
        (lambda: _alexnet(2, 227, (96, 256, 384, 384, 256), "caffe"), 60_965_224, 724_406_816),
        (lambda: _alexnet(1, 224, (64, 192, 384, 256, 256), "torch"), 61_100_840, 714_188_480),
    ],
)
def test_counts_of_classic_models(model: Any, parameters: int, macs: int) -> None:
    found = work_of(model())
    assert (found.parameters, found.macs) == (parameters, macs)
    assert work_of(model(), batch=8).macs == 8 * macs


LAYERS = st.lists(
    st.one_of(
        st.builds(
            lambda n, k, s, p: kl.Conv2D(n, k, s, padding=p),
            st.integers(1, 9),
            st.integers(1, 3),
            st.integers(1, 2),
            st.sampled_from(["same", "valid"]),
        ),
        st.builds(lambda k: kl.DepthwiseConv2D(k, padding="same"), st.integers(1, 3)),
        st.builds(kl.Dense, st.integers(1, 20)),
        st.just("relu").map(kl.Activation),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.integers(1, 3))
def test_counts_of_random_models_are_tensorflows(layers: list[Any], batch: int) -> None:
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers, kl.Flatten(), kl.Dense(2)])
    assert 2 * work_of(model, batch).macs == _profiled(model, batch)


def _profiled(model: Any, batch: int) -> int:
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    function = tf.function(model).get_concrete_function(tf.TensorSpec((batch, *model.input_shape[1:])))
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options |= {
        "output": "none",
        "account_type_regexes": ["Conv2D", "DepthwiseConv2dNative", "MatMul", "BatchMatMulV2"],
    }
    frozen = convert_variables_to_constants_v2(function)
    found = tf.compat.v1.profiler.profile(graph=frozen.graph, options=options)
    return int(found.total_float_ops)


def test_depth_is_the_longest_path_and_not_the_sum_of_all_layers() -> None:
    x = keras.Input((64,))
    short, long = kl.Dense(8)(x), kl.Dense(8)(kl.Dense(64)(kl.Dense(64)(x)))
    found = work_of(keras.Model(x, kl.Add()([short, long])))
    assert found.forward_depth == 3 * lg(64) + 1
    assert found.forward_work == 64 * 8 + 2 * 64 * 64 + 64 * 8 + 8
    chain = keras.Sequential([keras.Input((64,)), kl.Dense(64), kl.Dense(64)])
    assert work_of(chain).forward_depth == 2 * lg(64)


@given(st.integers(1, 10_000))
def test_time_on_processors_lies_between_brents_bounds(processors: int) -> None:
    low, high = work_of(_LENET, batch=4).time_bounds(processors)
    assert low <= high
    if processors == 1:
        assert high == work_of(_LENET, batch=4).work


_LENET = _lenet5()


def test_gradients_as_printed_and_as_derived() -> None:
    model = keras.Sequential([keras.Input((32, 32, 16)), kl.Conv2D(64, 3, padding="same")])
    (printed,), (derived,) = (work_of(model, 8, as_printed=flag).layers for flag in (True, False))
    assert printed.grad_weights.depth == printed.forward.depth == 2 * lg(3) + lg(16)
    assert derived.grad_weights.depth == lg(8 * 32 * 32)
    assert derived.grad_inputs.depth == lg(64) + 2 * lg(3)


def test_convolution_algorithms_after_table_6() -> None:
    model = keras.Sequential([keras.Input((16, 16, 8)), kl.Conv2D(4, 3, padding="same")])
    work = {
        how: work_of(model, 2, convolution=how).layers[0].forward.work
        for how in ("direct", "im2col", "fft", "winograd")
    }
    assert work["direct"] == work["im2col"] == 2 * 16 * 16 * 4 * 8 * 9
    assert work["fft"] == 256 * 8 * (4 * 8 + 2 * 8 + 2 * 4) + 256 * 2 * 8 * 4
    assert work["direct"] / work["winograd"] == 4  # Lavin and Gray: F(4, 3) needs a quarter of the products
    with pytest.raises(ValueError, match="none of direct"):
        work_of(model, convolution="guess")


def test_recurrent_attention_and_embedding_layers() -> None:
    tokens = keras.Input((20,), dtype="int32")
    x = kl.Embedding(100, 16)(tokens)
    lstm, gru = kl.LSTM(8, return_sequences=True), kl.GRU(8)
    attention = kl.MultiHeadAttention(num_heads=2, key_dim=4)
    y = gru(attention(lstm(x), lstm(x)))
    found = {layer.kind: layer for layer in work_of(keras.Model(tokens, y), 3).layers}
    assert found["Embedding"].macs == 0 and found["Embedding"].parameters == 1600
    assert found["LSTM"].macs == 4 * 3 * 20 * (16 * 8 + 8 * 8)
    assert found["GRU"].macs == 3 * 3 * 20 * (8 * 8 + 8 * 8)
    assert found["LSTM"].forward.depth == lg(16) + 20 * (lg(8) + 4)
    assert found["MultiHeadAttention"].macs == 3 * (4 * 20 * 8 * 8 + 20 * 20 * 8 * 2)
    assert wavefront(3, 20, 8) == 22 * (3 + 4)


def test_what_cannot_be_told_is_said() -> None:
    class Own(kl.Layer):
        def call(self, x: Any) -> Any:
            return x @ keras.ops.transpose(x)

    x = keras.Input((4,))
    assert work_of(keras.Model(x, Own(name="own")(x))).unknown == ("own (Own)",)


def test_models_inside_models_are_taken_as_a_chain_and_subclassed_ones_are_refused() -> None:
    inner = keras.Sequential([keras.Input((4,)), kl.Dense(8), kl.Dense(4)])
    x = keras.Input((4,))
    found = work_of(keras.Model(x, kl.Dense(2)(inner(x))))
    assert found.macs == 4 * 8 + 8 * 4 + 4 * 2 and not found.graph and found.forward_depth == lg(4) + lg(8) + lg(4)

    class Free(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = kl.Dense(8)

        def call(self, x: Any) -> Any:
            return self.first(x)

    model = Free()
    model(np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"layer 'dense.*' has no input .* functional model"):
        work_of(model)
