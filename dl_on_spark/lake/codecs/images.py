"""Cells that are PNG or JPEG files: (H, W) where they are grey, (H, W, 3) in the order red, green, blue."""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.errors import MissingExtraError
from dl_on_spark.lake.codecs.cells import BadCell, Cells, Target

# Pillow's modes that are arrays as they stand: 8 bits grey, 8 bits red-green-blue, 16 bits grey ("I": older Pillow).
_MODES = {"L": "uint8", "RGB": "uint8", "I;16": "uint16", "I": "uint16"}
_PNG_DEPTH = 24  # where a PNG tells its bits a channel
_QUALITY = 80  # petastorm's default


@dataclass(frozen=True)
class Images:
    """The codec of one image format."""

    format: str

    def decode(self, cells: Cells, target: Target) -> None:
        """Fill ``target`` with the images of ``cells``. Raises `MissingExtraError` without Pillow."""
        pillow = _pillow()
        for row, cell in cells:
            try:
                # Only this format's decoder, of which no text in the file can choose another.
                image = pillow.open(io.BytesIO(cell), formats=(self.format.upper(),))
                target.takes(row, *_kind(row, image, cell))  # before its pixels are unpacked
                target.put(row, np.asarray(image).astype(target.dtype, copy=False))
            except (OSError, ValueError, SyntaxError, EOFError, pillow.DecompressionBombError) as error:
                reason = "truncated or damaged" if "image file is truncated" in str(error) else "damaged, or none"
                raise BadCell(row, f"a {self.format} image that is {reason}") from error

    def encode(self, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
        """The image file of one array."""
        file = io.BytesIO()
        options = {"quality": _QUALITY} if self.format == "jpeg" else {}
        _pillow().fromarray(np.asarray(values, dtype, order="C")).save(file, self.format.upper(), **options)
        return file.getvalue()


def _kind(row: int, image: Any, cell: memoryview) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape of an image's array. Raises `BadCell` for pixels that would come out changed."""
    if image.mode not in _MODES:
        raise BadCell(row, f"an image of mode {image.mode}; grey and red-green-blue without transparency can be read")
    if image.format == "PNG" and image.mode == "RGB" and cell[_PNG_DEPTH] != 8:
        raise BadCell(row, f"a colour image of {cell[_PNG_DEPTH]} bits a channel; 8 can be read")
    width, height = image.size
    return np.dtype(_MODES[image.mode]), (height, width, 3) if image.mode == "RGB" else (height, width)


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "images") from error
