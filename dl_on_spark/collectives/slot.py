"""A rank's slot in shared memory: words that only its owner writes, and buffers that others read.

A slot is an anonymous file (``memfd_create``): it has no name in ``/dev/shm`` or anywhere else, so
that nothing is left behind whenever and however its ranks end, and the size of ``/dev/shm`` does
not matter. Other ranks of the same user open it as ``/proc/PID/fd/FD``, and know it by its nonce.

A word is eight aligned bytes, written and read with one instruction. ``Fence`` orders words and
buffers; see ``docs/decisions/shared-memory.md`` for what is relied on.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import threading
from enum import IntEnum
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from dl_on_spark.collectives.reduction import Array
from dl_on_spark.collectives.wire import HEADER_BYTES

BUFFERS = 4
"""Rounds that a rank may be ahead of the slowest one."""

BUFFER_BYTES = 512 * 1024
"""Small enough that what one rank writes is still in the cache when another reads it."""

NONCE_BYTES = 32
_WORDS_AT = 64
_BUFFERS_AT = 4096
_DATA_AT = 64  # behind the buffer's header, on the next cache line
_STRIDE = _DATA_AT + BUFFER_BYTES
SLOT_BYTES = _BUFFERS_AT + BUFFERS * _STRIDE


class Word(IntEnum):
    """What the owner of a slot tells by its words; rounds are counted from 1 over the slot's life."""

    FILLED = 0  # the last round whose values lie in the buffer
    REDUCED = 1  # the last round whose result lies in the buffer
    DONE = 2  # the last round in which the owner has read all it needs of the others' buffers
    AWAITS = 3  # 1 + place of the rank the owner sleeps for; 0 while it is awake


class Fence:
    """A full memory barrier: releasing and taking a lock nobody else knows.

    Release then acquire keeps all loads and stores before it apart from all after it, on x86
    (locked instructions) as on ARM64 (a store-release is not passed by a later load-acquire).
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        self._release()
        self._acquire()


class Slot:
    """The mapped slot of one rank."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SLOT_BYTES)
        self._octets = memoryview(self._memory)
        self.nonce = bytes(self._octets[:NONCE_BYTES])
        self.words = self._octets[_WORDS_AT : _WORDS_AT + 8 * len(Word)].cast("q")
        starts = [_BUFFERS_AT + index * _STRIDE for index in range(BUFFERS)]
        self.headers = [self._octets[start : start + HEADER_BYTES] for start in starts]
        self._arrays: dict[npt.DTypeLike, list[Array]] = {}

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A new slot and its file descriptor; OSError when the memory is not there.

        All pages are reserved now, and the file can never shrink: a later store cannot fail.
        """
        fd = os.memfd_create("dl_on_spark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, SLOT_BYTES)
            os.pwrite(fd, secrets.token_bytes(NONCE_BYTES), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, pid: int, fd: int, nonce: bytes) -> Self:
        """The slot of another process; OSError unless it is the very file that holds ``nonce``."""
        path = Path(f"/proc/{pid}/fd/{fd}")
        if not str(path.readlink()).startswith("/memfd:dl_on_spark"):
            raise OSError(f"{path} is no slot")
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(own)
            if not stat.S_ISREG(status.st_mode) or status.st_size != SLOT_BYTES:
                raise OSError(f"{path} is no slot of this version")
            slot = cls(own)
        finally:
            os.close(own)
        if not secrets.compare_digest(slot.nonce, nonce):
            slot.close()
            raise OSError(f"{path} is the slot of another rank")
        return slot

    def buffer(self, round_: int, dtype: np.dtype) -> Array:
        """The whole buffer of a round as an array; rounds take the buffers in turn."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            count = BUFFER_BYTES // dtype.itemsize
            arrays = self._arrays[dtype] = [
                np.frombuffer(self._memory, dtype, count, _BUFFERS_AT + index * _STRIDE + _DATA_AT)
                for index in range(BUFFERS)
            ]
        return arrays[round_ % BUFFERS]

    def close(self) -> None:
        """Unmap; the memory is free when the last rank has."""
        self._arrays.clear()
        for view in (self.words, *self.headers, self._octets):
            view.release()
        with contextlib.suppress(BufferError):  # an array of the last call still lives: it unmaps when it goes
            self._memory.close()
