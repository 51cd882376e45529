"""Columns of a table as the model's inputs: nulls, types and preprocessing by the schema.

Training and scoring use the same `Preprocessor` with the same stored statistics, so they cannot
drift apart. All work is vectorized: Arrow in, NumPy out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dl_on_spark.errors import SchemaError
from dl_on_spark.input_pipeline.hashing import stable_buckets
from dl_on_spark.input_pipeline.tensors import contiguous, flat_values, is_list, to_numpy
from dl_on_spark.lake.schema import Field, Schema
from dl_on_spark.lake.statistics import FieldStatistics, Statistics

Array = npt.NDArray[Any]
