"""What travels on a connection: frames on data lanes, notices on control lanes.

A frame is a fixed header and its payload. The receiver knows the header it expects, byte for
byte, so a peer's word never decides how much is read or allocated. A control lane carries at most
one notice in its life: that the peer left, failed, or gave up waiting, and who is to blame.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from dl_on_spark.collectives.algorithms import ALLREDUCE
from dl_on_spark.collectives.reduction import OPERATIONS

_HEADER = struct.Struct("<4sBBBBIQQQ")
HEADER_BYTES = _HEADER.size
_MAGIC = b"DLSF"
_NOTICE = struct.Struct("<BiH")
_TEXT_BYTES = 4096

_KINDS = (
    "allreduce",
    "broadcast",
    "allgather",
    "allgather_bytes",
    "reduce_scatter",
    "barrier",
    "message",
    "alltoall",
    "shift",
    "hosts",
    "request",
    "answer",
)
_OPERATIONS = ("", *OPERATIONS)
_ALGORITHMS = ("", *ALLREDUCE)
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "int8", "bool")


@dataclass(frozen=True)
class Call:
    """One collective as a rank sees it; all ranks must agree on it.

    ``root`` is the root of a broadcast, or how far a shift goes; ``elements`` counts the entire array, not
    one step.
    """

    kind: str
    sequence: int
    dtype: str = "uint8"
    elements: int = 0
    op: str = ""
    algorithm: str = ""
    root: int = 0

    def __str__(self) -> str:
        root = f"{'by' if self.kind == 'shift' else 'root'} {self.root}" if self.root else ""
        details = [d for d in (self.op, self.algorithm, root) if d]
        shape = f"{self.dtype}[{self.elements}]" if self.kind != "barrier" else ""
        return f"{self.kind}({', '.join([*([shape] if shape else []), *details])}) #{self.sequence}"

    def header(self, length: int) -> bytes:
        """The header of one frame of this call with ``length`` bytes of payload."""
        return _HEADER.pack(
            _MAGIC,
            _KINDS.index(self.kind),
            _OPERATIONS.index(self.op),
            _ALGORITHMS.index(self.algorithm),
            _DTYPES.index(self.dtype) if self.dtype in _DTYPES else len(_DTYPES),
            self.root,
            self.sequence,
            self.elements,
            length,
        )


def describe_header(header: bytes) -> str:
    """A peer's header in words, for the error of a mismatch."""
    magic, kind, op, algorithm, dtype, root, sequence, elements, length = _HEADER.unpack(header)
    try:
        if magic != _MAGIC:
            raise IndexError
        name = _DTYPES[dtype] if dtype < len(_DTYPES) else "other"
        call = Call(_KINDS[kind], sequence, name, elements, _OPERATIONS[op], _ALGORITHMS[algorithm], root)
    except IndexError:
        return "bytes that are no frame"
    return f"{call}, {length} bytes"


class NoticeKind(IntEnum):
    """Why a rank says its last word."""

    LEFT = 1  # closed in good order
    FAILED = 2  # an error on that rank, a mismatch, or a dead peer it saw
    STALLED = 3  # gave up waiting


@dataclass(frozen=True)
class Notice:
    """A rank's last word; ``culprit`` is the rank it blames (its own for LEFT)."""

    kind: NoticeKind
    culprit: int
    text: str = ""

    def encode(self) -> bytes:
        """The bytes on a control lane."""
        text = self.text.encode()[:_TEXT_BYTES]
        return _NOTICE.pack(self.kind, self.culprit, len(text)) + text


NOTICE_LIMIT = _NOTICE.size + _TEXT_BYTES


def decode_notice(data: bytes | bytearray) -> Notice | None:
    """The notice, or None while it is incomplete. ValueError on bytes that are none."""
    if len(data) < _NOTICE.size:
        return None
    kind, culprit, length = _NOTICE.unpack_from(data)
    if length > _TEXT_BYTES:
        raise ValueError(f"a notice of {length} bytes")
    if len(data) < _NOTICE.size + length:
        return None
    text = bytes(data[_NOTICE.size : _NOTICE.size + length]).decode(errors="replace")
    return Notice(NoticeKind(kind), culprit, text)
