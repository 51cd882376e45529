"""Cells that are .npz files with one array, ``arr``: a zip archive of an .npy file."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from dl_on_spark.lake.codecs import npy
from dl_on_spark.lake.codecs.cells import BadCell, Cells, Target

_MEMBER = "arr.npy"


def decode(cells: Cells, target: Target) -> None:
    """Fill ``target`` with the arrays of ``cells``."""
    # Nothing longer is unpacked: a few kilobytes can stand for gigabytes.
    longest = math.prod(target.shape) * target.dtype.itemsize + npy.LONGEST_HEADER
    for row, cell in cells:
        npy.read_into(row, memoryview(_unpacked(row, cell, longest)), target)


def encode(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """The .npz file of one array."""
    file = io.BytesIO()
    np.savez_compressed(file, arr=np.asarray(values, dtype, order="C"))
    return file.getvalue()


def _unpacked(row: int, cell: memoryview, longest: int) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(cell)) as archive, archive.open(_MEMBER) as member:
            found = member.read(longest + 1)
    except KeyError as error:
        raise BadCell(row, f"an .npz without {_MEMBER}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError, ValueError) as error:
        raise BadCell(row, f"no .npz: {' '.join(str(error).split()) or type(error).__name__}") from error
    if len(found) > longest:  # of another shape or type, which its header tells
        header = npy.header_of(row, memoryview(found))
        raise BadCell(row, f"an .npz of {header.dtype} {list(header.shape)}, longer than the schema's shape allows")
    return found
