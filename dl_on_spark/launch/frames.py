"""Length-prefixed JSON frames, and the handshake that proves both ends know the run's secret.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON (an object). The length is
checked against a limit before a byte of the body is read, so a stranger cannot make us allocate.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

MAX_FRAME = 4 << 20
_MAX_HANDSHAKE = 4096
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other end broke the protocol: cut a frame, sent too much, or does not know the secret."""


def encode(message: dict[str, Any], limit: int = MAX_FRAME) -> bytes:
    """The frame of `message`; NumPy scalars and arrays become numbers and lists."""
    try:
        body = json.dumps(message, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise FrameError(f"a message is not JSON: {error}") from error
    if len(body) > limit:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {limit}")
    return _LENGTH.pack(len(body)) + body


def read_frame(read: Callable[[int], bytes], limit: int = MAX_FRAME) -> dict[str, Any] | None:
    """The next message from `read` (at most n bytes a call, b"" at the end), or None at a clean end."""
    header = _read_exactly(read, _LENGTH.size)
    if not header:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is over the limit of {limit}")
    try:
        message = json.loads(_read_exactly(read, length, begun=True))
    except ValueError as error:
        raise FrameError(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a frame holds a {type(message).__name__}, not an object")
    return message


def read_pipe(descriptor: int) -> Callable[[int], bytes]:
    """A `read` for :func:`read_frame` over a pipe."""
    return lambda size: os.read(descriptor, size)


def write_pipe(descriptor: int, message: dict[str, Any]) -> None:
    """Write one frame to a pipe, whole."""
    view = memoryview(encode(message, limit=1 << 30))
    while view:
        view = view[os.write(descriptor, view) :]


def greet_driver(link: socket.socket, secret: bytes, identity: dict[str, Any]) -> None:
    """The worker's side of the handshake: say who we are, check the driver, prove ourselves."""
    ours = secrets.token_hex(16)
    link.sendall(encode({"identity": identity, "nonce": ours}))
    answer = read_frame(link.recv, _MAX_HANDSHAKE) or {}
    theirs = str(answer.get("nonce", ""))
    _check(secret, "driver", ours, theirs, identity, answer.get("proof"))
    link.sendall(encode({"proof": _proof(secret, "worker", ours, theirs, identity)}))


def greet_worker(link: socket.socket, secret: bytes) -> dict[str, Any]:
    """The driver's side of the handshake: the worker's identity, once it has proved the secret."""
    hello = read_frame(link.recv, _MAX_HANDSHAKE) or {}
    identity = hello.get("identity")
    if not isinstance(identity, dict):
        raise FrameError("the first frame carries no identity")
    theirs, ours = str(hello.get("nonce", "")), secrets.token_hex(16)
    proof = _proof(secret, "driver", theirs, ours, identity)
    link.sendall(encode({"nonce": ours, "proof": proof}))
    answer = read_frame(link.recv, _MAX_HANDSHAKE) or {}
    _check(secret, "worker", theirs, ours, identity, answer.get("proof"))
    return identity


def derive(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose from the run's secret, so that no two protocols share one."""
    return hmac.digest(secret, purpose.encode(), hashlib.sha256)


def _proof(secret: bytes, side: str, worker_nonce: str, driver_nonce: str, identity: dict[str, Any]) -> str:
    said = json.dumps([side, worker_nonce, driver_nonce, identity], sort_keys=True)
    return hmac.new(secret, said.encode(), hashlib.sha256).hexdigest()


def _check(
    secret: bytes, side: str, worker_nonce: str, driver_nonce: str, identity: dict[str, Any], proof: object
) -> None:
    expected = _proof(secret, side, worker_nonce, driver_nonce, identity)
    if not (isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())):
        raise FrameError(f"the {side} does not know the secret of this run")


def _read_exactly(read: Callable[[int], bytes], size: int, *, begun: bool = False) -> bytes:
    """`size` bytes, or b"" when the other end closed before the first of them (not once `begun`)."""
    parts = bytearray()
    while len(parts) < size:
        part = read(size - len(parts))
        if not part:
            if not parts and not begun:
                return b""
            raise FrameError(f"the connection ended after {len(parts)} of {size} bytes")
        parts += part
    return bytes(parts)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return value.tolist()
    return str(value)
