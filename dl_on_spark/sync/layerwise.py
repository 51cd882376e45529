"""Optimizers that divide by the norm of a layer's gradient: they need the whole gradient of each whole layer."""

from __future__ import annotations

from typing import Any

from dl_on_spark.collectives.codecs import Codec
from dl_on_spark.errors import ModelError

LAYERWISE = ("Lars", "Lamb")
_SPARSE = ("topk", "threshold", "dgc")


def check_whole_layers(optimizer: Any, codec: Codec) -> None:
    """Raise `ModelError` where ``codec`` sends a part of each gradient and the optimizer takes norms of layers.

    The part's norm says nothing of the layer's: LARS would give a few entries the step of the whole layer.
    """
    kind = type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
    if kind in LAYERWISE and codec.name in _SPARSE:
        raise ModelError(
            f"allreduce: compress={codec} sends parts of a layer's gradient, of which {kind} would take the norm "
            "for that of the layer.",
            fix="Use a codec that sends every entry (fp16, int8, powersgd), or SGD with momentum.",
        )
