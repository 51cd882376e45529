"""Work and depth of a Keras model: how much there is to do, and how long its longest chain of operations is.

Work W counts the survey's operations: multiply-accumulates of dense, convolutional, recurrent and attention layers,
and one for each element of the others (tables 4 and 6, with N = ``batch``). Depth D is the longest path of
dependent operations, every sum a tree. W/D is the parallelism that the model has at most. Where the survey's printed
depths of gradients are not the reductions that are done, both are offered: ``as_printed`` and derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dl_on_spark.concurrency.layers import RULES, Pass, Shapes

if TYPE_CHECKING:
    import keras

_VALUE_BYTES = 4


@dataclass(frozen=True)
class LayerWork:
    """One layer. ``macs``: multiply-accumulates forward, a part of ``forward.work``. ``outputs``: elements given.

    ``known`` is False for a layer whose work cannot be told from its class; it counts as an element-wise one.
    """

    name: str
    kind: str
    macs: int
    forward: Pass
    grad_weights: Pass
    grad_inputs: Pass
    parameters: int
    outputs: int
    inputs: int
    known: bool = True

    @property
    def work(self) -> float:
        """Operations of a training step: forward, and both gradients."""
        return self.forward.work + self.grad_weights.work + self.grad_inputs.work

    @property
    def bytes_moved(self) -> int:
        """Bytes of inputs, outputs and parameters, each moved once, forward."""
        return _VALUE_BYTES * (self.inputs + self.outputs + self.parameters)

    @property
    def intensity(self) -> float:
        """Operations per byte moved, forward: below the machine's balance, memory is the limit."""
        return self.forward.work / max(1, self.bytes_moved)


@dataclass(frozen=True)
class ModelWork:
    """All layers and their sums. ``forward_depth``, ``backward_depth``: of the longest path.

    ``graph`` is False where a model holds other models: their layers are taken as one chain.
    """

    batch: int
    layers: tuple[LayerWork, ...]
    forward_depth: float
    backward_depth: float
    graph: bool

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a forward pass over the batch."""
        return sum(layer.macs for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Weights, trainable or not."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_work(self) -> float:
        """Operations of a forward pass."""
        return sum(layer.forward.work for layer in self.layers)

    @property
    def backward_work(self) -> float:
        """Operations of a backward pass."""
        return sum(layer.grad_weights.work + layer.grad_inputs.work for layer in self.layers)

    @property
    def work(self) -> float:
        """Operations of a training step without the optimizer's."""
        return self.forward_work + self.backward_work

    @property
    def depth(self) -> float:
        """Longest chain of a training step."""
        return self.forward_depth + self.backward_depth

    @property
    def parallelism(self) -> float:
        """Average parallelism W/D: more processors than this do not all have something to do."""
        return self.work / max(1.0, self.depth)

    @property
    def activation_bytes(self) -> int:
        """Bytes of all outputs, which the backward pass needs."""
        return _VALUE_BYTES * sum(layer.outputs for layer in self.layers)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Layers whose work could not be told."""
        return tuple(f"{layer.name} ({layer.kind})" for layer in self.layers if not layer.known)

    def time_bounds(self, processors: int) -> tuple[float, float]:
        """Steps on P processors: ``max(W/P, D) <= T <= (W - D)/P + D`` (Brent's theorem)."""
        work, depth = self.work, self.depth
        return max(work / processors, depth), (work - depth) / processors + depth


def work_of(model: keras.Model, batch: int = 1, *, as_printed: bool = False, convolution: str = "direct") -> ModelWork:
    """Work and depth of a built model for ``batch`` rows.

    ``convolution``: direct, im2col, fft or winograd, after table 6. Raises ValueError for a
    subclassed model: its layers do not tell their shapes.
    """
    layers = [layer for layer in _flat(model) if type(layer).__name__ != "InputLayer"]
    found = {id(layer): _layer(layer, batch, as_printed, convolution) for layer in layers}
    order, parents = _graph(model)
    if order is None:
        chain = list(found.values())
        forward = sum(layer.forward.depth for layer in chain)
        return ModelWork(batch, tuple(chain), forward, sum(_backward(layer) for layer in chain), False)
    return ModelWork(
        batch,
        tuple(found.values()),
        _longest(order, parents, {key: layer.forward.depth for key, layer in found.items()}),
        _longest(order, parents, {key: _backward(layer) for key, layer in found.items()}),
        True,
    )


def _backward(layer: LayerWork) -> float:
    """The two gradients of a layer do not wait for each other."""
    return max(layer.grad_weights.depth, layer.grad_inputs.depth)


def _flat(model: Any) -> list[Any]:
    """The layers of a model and of the models inside it, each once."""
    found: list[Any] = []
    for layer in model.layers:
        inner = _flat(layer) if hasattr(layer, "layers") and hasattr(layer, "get_layer") else [layer]
        found += [one for one in inner if not any(one is known for known in found)]
    return found


def _graph(model: Any) -> tuple[list[int] | None, dict[int, set[int]]]:
    """Operations of a functional or sequential model in order, and those each waits for; None for any other model."""
    functional = getattr(model, "_functional", model)
    operations = getattr(functional, "operations", None) or getattr(functional, "_operations", None)
    if not operations or any(hasattr(one, "layers") and hasattr(one, "get_layer") for one in operations):
        return None, {}
    known = {id(one) for one in operations}
    parents: dict[int, set[int]] = {}
    for one in operations:
        nodes = getattr(one, "_inbound_nodes", [])
        parents[id(one)] = {
            id(parent.operation) for node in nodes for parent in node.parent_nodes if id(parent.operation) in known
        }
    return [id(one) for one in operations], parents


def _longest(order: Sequence[int], parents: dict[int, set[int]], depths: dict[int, float]) -> float:
    """Depth of the longest path; operations come in an order in which parents come first, or are put into one."""
    ends: dict[int, float] = {}

    def end(start: int) -> float:
        stack = [start]
        while stack:
            one = stack[-1]
            waiting = [parent for parent in parents.get(one, ()) if parent not in ends and parent != one]
            if waiting:
                stack += waiting
                continue
            ends[one] = depths.get(one, 0.0) + max((ends[p] for p in parents.get(one, ()) if p != one), default=0.0)
            stack.pop()
        return ends[start]

    return max((end(one) for one in order), default=0.0)


def _layer(layer: Any, batch: int, as_printed: bool, convolution: str) -> LayerWork:
    kind = next((c.__name__ for c in type(layer).__mro__ if c.__name__ in RULES), None)
    shapes = Shapes(batch, _shapes(layer, "input"), _shapes(layer, "output"), as_printed, convolution)
    parameters = sum(math.prod(weight.shape) for weight in layer.weights)
    rule = RULES.get(kind or "")
    macs, forward, weights, inputs = RULES["Activation"](layer, shapes) if rule is None else rule(layer, shapes)
    return LayerWork(
        layer.name,
        type(layer).__name__,
        macs,
        forward,
        weights,
        inputs,
        parameters,
        shapes.outputs,
        shapes.inputs,
        rule is not None,
    )


def _shapes(layer: Any, side: str) -> list[tuple[int, ...]]:
    """Shapes of one row of a layer's inputs or outputs, the batch dimension left out."""
    try:
        tensors = getattr(layer, side)
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"layer {layer.name!r} has no {side} of known shape: give a functional model or a sequential one."
        ) from error
    return [tuple(int(size or 1) for size in tensor.shape[1:]) for tensor in _leaves(tensors)]


def _leaves(tensors: Any) -> Iterable[Any]:
    if isinstance(tensors, dict):
        tensors = list(tensors.values())
    if isinstance(tensors, (list, tuple)):
        for tensor in tensors:
            yield from _leaves(tensor)
    else:
        yield tensors
