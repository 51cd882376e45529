"""How ranks that know only a folder or one address find each other.

``file:///dir``: each rank leaves its address in the (shared) folder under a name derived from the
secret, so that runs do not meet by accident. ``tcp://host:port``: rank 0 listens there, collects
the addresses over authenticated connections and hands each rank the list.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dl_on_spark.collectives.authentication import Identity, Lane
from dl_on_spark.collectives.mesh import Acceptor, Key, build_mesh, connect
from dl_on_spark.errors import CollectiveError, DeadlineExceeded

ADDRESS_BYTES = 300  # the longest host name, a colon and a port


def listen(host: str, port: int = 0, backlog: int = 256) -> socket.socket:
    """A listening socket on one interface only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise CollectiveError(
            f"cannot listen on {host}:{port}: {error}.",
            fix="Pass host= an address of this machine that the other ranks can reach.",
        ) from error
    return listener


def meet(me: Identity, rendezvous: str, host: str | None, deadline_s: float) -> dict[Key, socket.socket]:
    """The mesh's connections by (peer, lane), found through ``rendezvous``."""
    parts = urlsplit(rendezvous)
    if parts.scheme == "file" and parts.path:
        return _meet_in_folder(me, Path(unquote(parts.path)), host or _own_address(), deadline_s)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return _meet_at_rank_0(me, parts.hostname, parts.port, host, deadline_s)
    raise CollectiveError(
        f"the rendezvous {rendezvous!r} is neither a folder nor an address.",
        fix="Use file:///a/shared/folder or tcp://host:port.",
    )


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _meet_in_folder(me: Identity, folder: Path, host: str, deadline_s: float) -> dict[Key, socket.socket]:
    name = f"{me.run}\0{me.world_size}".encode()
    tag = hmac.new(me.secret, b"rendezvous" + name, hashlib.sha256).hexdigest()[:16]
    listener = listen(host)
    mine = folder / f"collectives-{tag}-{me.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = mine.with_suffix(f".{os.getpid()}")
        partial.write_text(join_address(host, listener.getsockname()[1]))
        partial.replace(mine)
    except OSError as error:
        listener.close()
        raise CollectiveError(
            f"rank {me.rank} cannot write to the rendezvous folder {folder}: {error}.",
            fix="Use a folder that every rank can write to.",
        ) from error

    def address_of(rank: int) -> str:
        try:
            with (folder / f"collectives-{tag}-{rank}").open() as file:
                return file.read(ADDRESS_BYTES)
        except FileNotFoundError:
            raise LookupError(f"rank {rank} has not announced itself in {folder}") from None

    try:
        return build_mesh(me, listener, address_of, deadline_s)
    finally:
        mine.unlink(missing_ok=True)  # only higher ranks read it, and they are all connected


def _meet_at_rank_0(
    me: Identity, host: str, port: int, own_host: str | None, deadline_s: float
) -> dict[Key, socket.socket]:
    deadline = time.monotonic() + deadline_s
    left: Callable[[], float] = lambda: max(0.001, deadline - time.monotonic())  # noqa: E731
    if me.rank == 0:
        door = listen(host, port)
        listener = listen(own_host or host)
        try:
            here = join_address(own_host or host, listener.getsockname()[1])
            table = _collect(me, door, here, deadline)
        except BaseException:
            listener.close()
            raise
    else:
        with connect(me, 0, Lane.RENDEZVOUS, lambda _: join_address(host, port), deadline) as sock:
            sock.settimeout(left())
            own = own_host or sock.getsockname()[0]
            listener = listen(own)
            try:
                sock.sendall(join_address(own, listener.getsockname()[1]).encode().ljust(ADDRESS_BYTES))
                table = _read_table(me, sock, deadline)
            except OSError as error:
                listener.close()
                raise CollectiveError(
                    f"rank {me.rank} lost rank 0 at the rendezvous {host}:{port}: {error}.",
                    fix="See rank 0's own error.",
                ) from error
            except BaseException:
                listener.close()
                raise
    return build_mesh(me, listener, lambda rank: table[rank], left())


def _collect(me: Identity, door: socket.socket, here: str, deadline: float) -> list[str]:
    wanted = [(peer, Lane.RENDEZVOUS) for peer in range(1, me.world_size)]
    try:
        socks = Acceptor(me, door, wanted, deadline).result()
    finally:
        door.close()
    table = [here] * me.world_size
    try:
        for (peer, _), sock in socks.items():
            table[peer] = _read(sock, ADDRESS_BYTES, peer, deadline).decode().strip()
        data = json.dumps(table).encode().ljust(ADDRESS_BYTES * me.world_size)
        for sock in socks.values():
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.sendall(data)
    except OSError as error:
        raise CollectiveError(f"rank 0 lost a rank at the rendezvous: {error}.") from error
    finally:
        for sock in socks.values():
            sock.close()
    return table


def _read_table(me: Identity, sock: socket.socket, deadline: float) -> list[str]:
    table = json.loads(_read(sock, ADDRESS_BYTES * me.world_size, 0, deadline))
    return [str(address) for address in table]


def _read(sock: socket.socket, size: int, peer: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            chunk = sock.recv(size - len(data))
        except TimeoutError:
            raise DeadlineExceeded(f"rank {peer} did not answer at the rendezvous in time.") from None
        if not chunk:
            raise CollectiveError(f"rank {peer} left at the rendezvous.", fix=f"See rank {peer}'s own error.")
        data += chunk
    return data
