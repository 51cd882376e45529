"""What a table says of a column's tensors: codec, dtype and shape, kept as metadata of its Arrow field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pyarrow as pa

# Codecs whose cells are bytes that hold a tensor (`lake.codecs`).
TENSOR_CODECS = {"ndarray", "compressed_ndarray", "png", "jpeg"}
TENSOR_DTYPES = {
    *("bool", "float16", "float32", "float64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
_KEY = b"dl_on_spark.tensor"


@dataclass(frozen=True)
class TensorColumn:
    """``codec``: a name of `codecs`, "scalar" or None (stored as it is); a None in ``shape``: any size."""

    codec: str | None
    dtype: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, field: pa.Field) -> TensorColumn | None:
        """What the table says of a column; None where it says nothing."""
        text = (field.metadata or {}).get(_KEY)
        if text is None:
            return None
        told = json.loads(text)
        return cls(told["codec"], told["dtype"], tuple(told["shape"]))

    def on(self, field: pa.Field) -> pa.Field:
        """The Arrow field with this said of it."""
        return field.with_metadata({_KEY: json.dumps(asdict(self)).encode()})

    @property
    def encoded(self) -> bool:
        """Whether a cell is bytes that a codec reads."""
        return self.codec in TENSOR_CODECS

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.codec} {self.dtype} [{sizes}]"


def difference(column: pa.Field, codec: str | None, dtype: str, shape: tuple[int, ...], *, padded: bool) -> str | None:
    """What a schema's field asks for that the table does not hold; None where the two fit.

    A table that says nothing is believed: its cells are looked at when they are read.
    """
    stored = TensorColumn.of(column)
    if stored is None:
        return None
    if stored.codec != codec:
        return f"codec {codec}"
    if stored.dtype != dtype:
        return f"dtype {dtype}"
    sizes = zip(stored.shape, shape, strict=False)
    fits = all(size is None or size == wanted or (padded and size < wanted) for size, wanted in sizes)
    return None if fits and len(stored.shape) == len(shape) else f"shape {list(shape)}"
