"""Which ranks share a host, proved: each maps the slots of the others and finds their nonces there.

A host name proves nothing (containers share it or differ in it), so ranks tell each other, over
the authenticated mesh, which kernel and process namespace they run in, and where their slot is.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dl_on_spark.collectives.scheduled import Scheduled
from dl_on_spark.collectives.shared import SharedMemory
from dl_on_spark.collectives.slot import Slot
from dl_on_spark.collectives.tcp import TcpBackend
from dl_on_spark.collectives.wire import Call

_TEXT_BYTES = 512


def host_identity() -> str:
    """Equal on ranks that may reach each other's slots: kernel since boot, process namespace, user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.geteuid()}"


@dataclass(frozen=True)
class _Announcement:
    """Where a rank's slot and pipe are; ``problem`` says why it has none."""

    host: str = ""
    pid: int = 0
    slot: int = -1
    bell: int = -1
    nonce: str = ""
    problem: str = ""

    def text(self) -> str:
        """As JSON, in fewer than ``_TEXT_BYTES`` bytes."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, both ascending, and this rank's shared memory.

    ``shared`` is None when this rank is alone on its host, and everywhere when ``problem`` says why
    shared memory cannot be used.
    """

    groups: tuple[tuple[int, ...], ...]
    shared: SharedMemory | None
    problem: str

    @property
    def usable(self) -> bool:
        """Some ranks share memory; the same answer on all ranks."""
        return not self.problem and any(len(group) > 1 for group in self.groups)


def find_hosts(tcp: TcpBackend, rank: int, world: Scheduled) -> Hosts:
    """Offer a slot, map those of the ranks of this host, and agree with all ranks on the outcome."""
    with contextlib.ExitStack() as announced_ends, contextlib.ExitStack() as kept:
        slot, bell, mine = _offer(announced_ends, kept)
        announced = [_Announcement(**json.loads(text)) for text in _gather(world, 1, mine.text())]
        problems = [f"rank {peer}: {it.problem}" for peer, it in enumerate(announced) if it.problem]
        by_host: dict[str, list[int]] = {}
        for peer, it in enumerate(announced):
            by_host.setdefault(it.host, []).append(peer)
        members = by_host[mine.host]
        slots: list[Slot] = []
        bells: list[int] = []
        problem = ""
        if slot is not None and not problems and len(members) > 1:
            try:
                for peer in members:
                    slots.append(slot if peer == rank else _attach(announced[peer], kept))
                    bells.append(_open_bell(announced[peer], kept))
            except OSError as error:
                problem = f"rank {rank}: {error}"
        problems += [verdict for verdict in _gather(world, 2, problem) if verdict]
        groups = tuple(tuple(group) for group in by_host.values())
        if problems or not slots:
            return Hosts(groups, None, problems[0] if problems else "")
        kept.pop_all()
        return Hosts(groups, SharedMemory(tcp, rank, members, slots, bell, bells), "")


def _offer(announced_ends: contextlib.ExitStack, kept: contextlib.ExitStack) -> tuple[Slot | None, int, _Announcement]:
    """This rank's slot, the pipe end it will sleep on, and what to tell the others.

    ``announced_ends`` closes what others open by its number, needed until all have.
    """
    try:
        host = host_identity()
        slot, fd = Slot.create()
    except (OSError, AttributeError) as error:  # AttributeError: this system has no memfd_create
        return None, -1, _Announcement(problem=f"{error}"[:100])
    announced_ends.callback(os.close, fd)
    kept.callback(slot.close)
    bell, ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    announced_ends.callback(os.close, ringer)
    kept.callback(os.close, bell)
    return slot, bell, _Announcement(host, os.getpid(), fd, ringer, slot.nonce.hex())


def _gather(world: Scheduled, number: int, text: str) -> list[str]:
    """Every rank's text, by rank; a fixed size, so that nobody's word decides what others allocate."""
    octets = np.zeros((world.size, _TEXT_BYTES), np.uint8)
    data = text.encode()[:_TEXT_BYTES]
    octets[world.place, : len(data)] = np.frombuffer(data, np.uint8)
    bounds = [_TEXT_BYTES * place for place in range(world.size + 1)]
    world.allgather(Call("hosts", number), octets.reshape(-1), bounds)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in octets]


def _attach(it: _Announcement, kept: contextlib.ExitStack) -> Slot:
    slot = Slot.attach(it.pid, it.slot, bytes.fromhex(it.nonce))
    kept.callback(slot.close)
    return slot


def _open_bell(it: _Announcement, kept: contextlib.ExitStack) -> int:
    path = Path(f"/proc/{it.pid}/fd/{it.bell}")
    if not str(path.readlink()).startswith("pipe:"):
        raise OSError(f"{path} is no pipe")
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kept.callback(os.close, fd)
    return fd
