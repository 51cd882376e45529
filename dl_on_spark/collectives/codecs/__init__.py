"""Gradient compression: codecs that sum a bucket of gradients over ranks in fewer bytes.

Reading order: ``base``, ``payload``, ``sparse``, ``packing``, then one codec a file, ``registry``. Pure NumPy.
``docs/compression.md`` has the table of codecs with their bytes, identities and papers.
"""

from __future__ import annotations

from dl_on_spark.collectives.codecs.base import Bucket, Codec, Compressor
from dl_on_spark.collectives.codecs.bf16 import BF16
from dl_on_spark.collectives.codecs.dgc import DGC
from dl_on_spark.collectives.codecs.fp16 import FP16
from dl_on_spark.collectives.codecs.int8 import Int8
from dl_on_spark.collectives.codecs.onebit import OneBit
from dl_on_spark.collectives.codecs.powersgd import PowerSGD
from dl_on_spark.collectives.codecs.qsgd import QSGD
from dl_on_spark.collectives.codecs.registry import CODECS, parse_codec
from dl_on_spark.collectives.codecs.terngrad import TernGrad
from dl_on_spark.collectives.codecs.threshold import Threshold
from dl_on_spark.collectives.codecs.topk import TopK

__all__ = [
    "BF16",
    "CODECS",
    "DGC",
    "FP16",
    "QSGD",
    "Bucket",
    "Codec",
    "Compressor",
    "Int8",
    "OneBit",
    "PowerSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "parse_codec",
]
