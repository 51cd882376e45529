"""Gradient compression: codecs that sum a bucket of gradients over ranks in fewer bytes.

Reading order: ``base``, ``exchange``, then one codec a file, ``registry``. Pure NumPy; ``docs/compression.md``
has the table of codecs with their bytes, identities and papers.
"""

from __future__ import annotations

from dl_on_spark.collectives.codecs.base import Bucket, Codec, Compressor
from dl_on_spark.collectives.codecs.bf16 import BF16
from dl_on_spark.collectives.codecs.fp16 import FP16
from dl_on_spark.collectives.codecs.registry import CODECS, parse_codec

__all__ = ["BF16", "CODECS", "FP16", "Bucket", "Codec", "Compressor", "parse_codec"]
