"""Both ends of a connection prove that they know the run's secret, before anything else is read.

Connector: hello (who it is, whom it wants, world size, lane, nonce). Acceptor: nonce. Connector:
proof. Acceptor: proof. A proof is HMAC-SHA256 under the secret over a role label, the run, the
hello and both nonces: it is good for one connection, one pair, one direction and one run; a
recorded one is worth nothing. The acceptor proves itself last, so a stranger learns a nonce only.
Every message has a fixed length.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum

_HELLO = struct.Struct(">8sBIII32s")
_MAGIC = b"DLSPARK1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class Lane(IntEnum):
    """What a connection is for."""

    DATA = 0
    CONTROL = 1
    RENDEZVOUS = 2


@dataclass(frozen=True)
class Identity:
    """What this rank must prove and what it asks of a peer."""

    rank: int
    world_size: int
    secret: bytes
    run: str = ""

    def proof(self, role: bytes, hello: bytes, nonce: bytes) -> bytes:
        """HMAC-SHA256 of one side; the run's length is part of it, so that fields cannot shift."""
        run = self.run.encode()
        message = b"".join((role, len(run).to_bytes(4, "big"), run, hello, nonce))
        return hmac.new(self.secret, message, hashlib.sha256).digest()


class Refused(Exception):
    """A connection that did not prove what it must; says why. Stays inside this package."""


Handshake = Generator[tuple[bytes, int], bytes, tuple[int, Lane]]
"""Yields (bytes to send, number of bytes to read next), is sent those bytes, returns (peer, lane)."""


def connecting(me: Identity, peer: int, lane: Lane) -> Handshake:
    """The connector's side, as a generator that knows nothing of sockets."""
    hello = _HELLO.pack(_MAGIC, lane, me.rank, peer, me.world_size, secrets.token_bytes(_NONCE_BYTES))
    nonce = yield hello, _NONCE_BYTES
    proof = yield me.proof(b"connector", hello, nonce), _PROOF_BYTES
    if not hmac.compare_digest(proof, me.proof(b"acceptor", hello, nonce)):
        raise Refused("the acceptor does not know the secret")
    return peer, lane


def accepting(me: Identity) -> Handshake:
    """The acceptor's side; the last item yielded asks for no bytes."""
    hello = yield b"", _HELLO.size
    magic, lane, rank, wanted, world_size, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or lane not in Lane.__members__.values():
        raise Refused("no hello of this protocol")
    if wanted != me.rank or world_size != me.world_size or rank >= world_size or rank == me.rank:
        raise Refused(f"a hello of rank {rank} of {world_size} to rank {wanted}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = yield nonce, _PROOF_BYTES
    if not hmac.compare_digest(proof, me.proof(b"connector", hello, nonce)):
        raise Refused(f"no proof of the secret by one that says it is rank {rank}")
    yield me.proof(b"acceptor", hello, nonce), 0
    return rank, Lane(lane)
