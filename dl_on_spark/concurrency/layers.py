"""One rule a kind of layer: its multiply-accumulates, and work and depth of its three passes.

The survey's table 4 (operators) and table 6 (convolution algorithms); recurrent and attention layers are derived in the
same way. ``lg`` is the base-2 logarithm, rounded up: the levels of a tree of that many terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pass:
    """Work and depth of one pass through one layer."""

    work: float = 0.0
    depth: float = 0.0


Counts = tuple[int, Pass, Pass, Pass]
Rule = Callable[[Any, "Shapes"], Counts]
_WINOGRAD_TILE = 4
_STEP_DEPTH = 4  # element-wise operations of a recurrent cell that follow each other


@dataclass(frozen=True)
class Shapes:
    """``rows`` (N) and the shapes of one row's inputs and outputs of a layer."""

    rows: int
    of_inputs: list[tuple[int, ...]]
    of_outputs: list[tuple[int, ...]]
    as_printed: bool
    convolution: str

    @property
    def inputs(self) -> int:
        """Elements of all inputs."""
        return self.rows * sum(math.prod(shape) for shape in self.of_inputs)

    @property
    def outputs(self) -> int:
        """Elements of all outputs."""
        return self.rows * sum(math.prod(shape) for shape in self.of_outputs)


def lg(terms: float) -> int:
    """Levels of a tree that adds so many terms."""
    return math.ceil(math.log2(terms)) if terms > 1 else 0


def _nothing(layer: Any, s: Shapes) -> Counts:
    return 0, Pass(), Pass(), Pass()


def _elementwise(layer: Any, s: Shapes) -> Counts:
    each = Pass(s.outputs, 1)
    return 0, each, Pass(), each


def _merge(layer: Any, s: Shapes) -> Counts:
    """n inputs of one shape: n - 1 operations for an element."""
    several = len(s.of_inputs)
    work = s.outputs * max(1, several - 1)
    return 0, Pass(work, lg(several) or 1), Pass(), Pass(s.inputs, 1)


def _dense(layer: Any, s: Shapes) -> Counts:
    """N Cin Cout; log Cin, log N, log Cout."""
    shape = layer.kernel.shape
    c_in, c_out = int(shape[0]), int(shape[-1])
    rows = s.outputs // c_out
    work = rows * c_in * c_out
    return work, Pass(work, lg(c_in)), Pass(work, lg(rows)), Pass(work, lg(c_out))


def _convolution(layer: Any, s: Shapes) -> Counts:
    kernel = [int(size) for size in layer.kernel.shape[:-2]]
    c_in, c_out = (int(size) for size in layer.kernel.shape[-2:])  # c_in: of one group
    places = s.outputs // c_out
    macs = places * c_out * c_in * math.prod(kernel)
    depth = sum(map(lg, kernel)) + lg(c_in)
    forward = Pass(macs, depth)
    if s.convolution == "fft":
        forward = _fft(s, c_in, c_out)
    elif s.convolution == "winograd":
        forward = _winograd(s, kernel, c_in, c_out)
    elif s.convolution not in {"direct", "im2col"}:
        raise ValueError(f"convolution={s.convolution!r} is none of direct, im2col, fft, winograd.")
    if s.as_printed:
        return macs, forward, Pass(macs, depth), Pass(macs, depth)
    return macs, forward, Pass(macs, lg(places)), Pass(macs, lg(c_out) + sum(map(lg, kernel)))


def _fft(s: Shapes, c_in: int, c_out: int) -> Pass:
    """``c HW lg(HW) (Cout Cin + N Cin + N Cout) + HW N Cin Cout``, with c = 1; ``2 lg HW + lg Cin``."""
    area = math.prod(s.of_inputs[0][:-1])
    transforms = area * max(1.0, math.log2(area)) * (c_out * c_in + s.rows * c_in + s.rows * c_out)
    return Pass(transforms + area * s.rows * c_in * c_out, 2 * lg(area) + lg(c_in))


def _winograd(s: Shapes, kernel: list[int], c_in: int, c_out: int) -> Pass:
    """F(m, r) for square kernels: tiles of m outputs, a = m + r - 1.

    Derived (Lavin and Gray, 2016): ``P Cin Cout a²`` products over P tiles of output. As printed in the survey:
    ``a (r² + a r + 2 a² + a m + m²) + Cout Cin P`` with a = m - r + 1.
    """
    m, r = _WINOGRAD_TILE, kernel[0]
    tiles = s.rows * math.prod(math.ceil(size / m) for size in s.of_outputs[0][:-1])
    a = m - r + 1 if s.as_printed else m + r - 1
    depth = 2 * lg(r) + 4 * lg(a) + lg(c_in)
    if s.as_printed:
        return Pass(a * (r**2 + a * r + 2 * a**2 + a * m + m**2) + c_out * c_in * tiles, depth)
    return Pass(tiles * c_in * c_out * a**2, depth)


def _transposed_convolution(layer: Any, s: Shapes) -> Counts:
    """The gradient of a convolution by its inputs: the work is that of the convolution from outputs to inputs."""
    kernel = [int(size) for size in layer.kernel.shape[:-2]]
    c_out, c_in = (int(size) for size in layer.kernel.shape[-2:])
    macs = s.inputs * c_out * math.prod(kernel)
    depth = sum(map(lg, kernel))
    grad = Pass(macs, lg(s.inputs // c_in))
    return macs, Pass(macs, depth + lg(c_in)), grad, Pass(macs, depth + lg(c_out))


def _depthwise_convolution(layer: Any, s: Shapes) -> Counts:
    kernel = [int(size) for size in layer.kernel.shape[:-2]]
    macs = s.outputs * math.prod(kernel)
    depth = sum(map(lg, kernel))
    return macs, Pass(macs, depth), Pass(macs, lg(s.outputs // s.of_outputs[0][-1])), Pass(macs, depth)


def _separable_convolution(layer: Any, s: Shapes) -> Counts:
    kernel = [int(size) for size in layer.depthwise_kernel.shape[:-2]]
    middle, c_out = (int(size) for size in layer.pointwise_kernel.shape[-2:])
    places = s.outputs // c_out
    macs = places * middle * (math.prod(kernel) + c_out)
    depth = sum(map(lg, kernel)) + lg(middle)
    return macs, Pass(macs, depth), Pass(macs, lg(places)), Pass(macs, lg(c_out) + sum(map(lg, kernel)))


def _pooling(layer: Any, s: Shapes) -> Counts:
    """NCHW of the inputs; log Kx + log Ky."""
    size = getattr(layer, "pool_size", None)
    window = [size] if isinstance(size, int) else list(size) if size is not None else list(s.of_inputs[0][:-1])
    return 0, Pass(s.inputs, sum(map(lg, window))), Pass(), Pass(s.inputs, 1)


def _normalization(layer: Any, s: Shapes) -> Counts:
    """NCHW; log N as printed, and the logarithm of all that is added for one channel as derived."""
    channels = s.of_outputs[0][-1] if s.of_outputs[0] else 1
    added = s.outputs // channels if type(layer).__name__ == "BatchNormalization" else s.outputs // s.rows
    depth = lg(s.rows if s.as_printed else added)
    each = Pass(s.outputs, depth)
    return 0, each, each, each


def _softmax(layer: Any, s: Shapes) -> Counts:
    each = Pass(s.outputs, 1 + lg(s.of_outputs[0][-1]))
    return 0, each, Pass(), each


def _activation(layer: Any, s: Shapes) -> Counts:
    name = getattr(getattr(layer, "activation", None), "__name__", "")
    if name == "softmax":
        return _softmax(layer, s)
    return _nothing(layer, s) if name == "linear" else _elementwise(layer, s)


def _embedding(layer: Any, s: Shapes) -> Counts:
    """A look-up: no arithmetic forward; backward, rows that occur several times are added up."""
    return 0, Pass(0, 1), Pass(s.outputs, lg(s.inputs)), Pass()


def _dot(layer: Any, s: Shapes) -> Counts:
    shared = s.inputs // max(1, 2 * s.outputs) if s.outputs else 1
    first = s.of_inputs[0]
    axes = layer.axes if isinstance(layer.axes, int) else layer.axes[0]
    shared = first[axes - 1] if axes > 0 else first[axes]
    work = s.outputs * shared
    return work, Pass(work, lg(shared)), Pass(), Pass(2 * work, lg(s.outputs // s.rows))


def _attention(layer: Any, s: Shapes) -> Counts:
    """Projections of query, key, value and output, and two products of the length of the keys."""
    query = s.of_inputs[0]
    keys = s.of_inputs[1] if len(s.of_inputs) > 1 else query
    length, model = math.prod(query[:-1]), query[-1]
    key_length, heads = math.prod(keys[:-1]), layer.num_heads
    key, value = layer.key_dim, layer.value_dim or layer.key_dim
    projections = length * model * heads * key + key_length * keys[-1] * heads * (key + value)
    products = length * key_length * heads * (key + value)
    output = length * heads * value * s.of_outputs[0][-1]
    macs = s.rows * (projections + products + output)
    work = macs + s.rows * heads * length * key_length  # softmax
    depth = lg(model) + lg(key) + 1 + lg(key_length) + lg(key_length) + lg(heads * value)
    return macs, Pass(work, depth), Pass(macs, depth + lg(s.rows * length)), Pass(macs, depth)


def _recurrent(gates: int) -> Rule:
    def rule(layer: Any, s: Shapes) -> Counts:
        """``g N T (Cin Ch + Ch²)``; the inputs' products are done for all steps at once: ``lg Cin + T (lg Ch + c)``."""
        length, c_in = s.of_inputs[0][0], s.of_inputs[0][-1]
        units = layer.units
        macs = gates * s.rows * length * (c_in * units + units * units)
        work = macs + gates * s.rows * length * units
        depth = lg(c_in) + length * (lg(units) + _STEP_DEPTH)
        return macs, Pass(work, depth), Pass(macs, lg(s.rows * length)), Pass(macs, depth)

    return rule


def _bidirectional(layer: Any, s: Shapes) -> Counts:
    rule = RULES[type(layer.forward_layer).__name__]
    macs, forward, weights, inputs = rule(layer.forward_layer, s)
    return 2 * macs, _twice(forward), _twice(weights), _twice(inputs)


def _twice(one: Pass) -> Pass:
    return Pass(2 * one.work, one.depth)


def wavefront(layers: int, length: int, units: int) -> int:
    """Depth of L stacked recurrent layers whose cells run as a wavefront: ``(T + L - 1)(lg Ch + c)``."""
    return (length + layers - 1) * (lg(units) + _STEP_DEPTH)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "Flatten", "Reshape", "Permute", "Concatenate", "Identity"),
        _nothing,
    ),
    **dict.fromkeys(
        ("ZeroPadding1D", "ZeroPadding2D", "Cropping1D", "Cropping2D", "RepeatVector", "Masking"), _nothing
    ),
    **dict.fromkeys(("UpSampling1D", "UpSampling2D", "Rescaling", "Normalization"), _elementwise),
    **dict.fromkeys(("ReLU", "LeakyReLU", "PReLU", "ELU"), _elementwise),
    **dict.fromkeys(("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum"), _merge),
    **dict.fromkeys(
        ("BatchNormalization", "LayerNormalization", "GroupNormalization", "UnitNormalization"), _normalization
    ),
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _convolution),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _transposed_convolution),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _depthwise_convolution),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _separable_convolution),
    **{f"{kind}Pooling{n}D": _pooling for kind in ("Max", "Average", "GlobalMax", "GlobalAverage") for n in (1, 2, 3)},
    "Activation": _activation,
    "Softmax": _softmax,
    "Dense": _dense,
    "Embedding": _embedding,
    "Dot": _dot,
    "MultiHeadAttention": _attention,
    "LSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "SimpleRNN": _recurrent(1),
    "Bidirectional": _bidirectional,
}
