"""Codecs by name: ``fp16``, ``topk(0.01)``. A new codec is one module and one line here."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from dl_on_spark.collectives.codecs.base import Codec
from dl_on_spark.collectives.codecs.bf16 import BF16
from dl_on_spark.collectives.codecs.dgc import DGC
from dl_on_spark.collectives.codecs.fp16 import FP16
from dl_on_spark.collectives.codecs.int8 import Int8
from dl_on_spark.collectives.codecs.onebit import OneBit
from dl_on_spark.collectives.codecs.powersgd import PowerSGD
from dl_on_spark.collectives.codecs.qsgd import QSGD
from dl_on_spark.collectives.codecs.terngrad import TernGrad
from dl_on_spark.collectives.codecs.threshold import Threshold
from dl_on_spark.collectives.codecs.topk import TopK
from dl_on_spark.errors import ConfigError

CODECS: dict[str, type[Codec]] = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "topk": TopK,
    "threshold": Threshold,
    "dgc": DGC,
    "onebit": OneBit,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "powersgd": PowerSGD,
}

_CALL = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*")


def parse_codec(text: str | Codec) -> Codec:
    """The codec that ``text`` names: a name, with the codec's numbers in their order where they are not the
    defaults, as in ``dgc(0.001,0.9)``. Raises `ConfigError` naming what is unknown and the nearest known."""
    if isinstance(text, Codec):
        return text
    match = _CALL.fullmatch(str(text))
    name = match[1] if match else str(text)
    if match is None or name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, n=1)
        raise ConfigError(
            f"compress: codec {name!r} is unknown.",
            fix=f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(CODECS)}.",
        )
    kind = CODECS[name]
    options = [option.name for option in dataclasses.fields(kind)]  # type: ignore[arg-type]
    try:
        return kind(*(_number(word.strip()) for word in (match[2] or "").split(",") if word.strip()))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"compress={text}: {error}.",
            fix=f"Write {name}({', '.join(options)}), with numbers." if options else f"Write {name} alone.",
        ) from error


def _number(word: str) -> Any:
    if word in {"none", "null"}:
        return None
    return int(word) if word.lstrip("+-").isdigit() else float(word)
