"""Ranks as real processes: runs a module-level function on each and brings back what it returns."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import DLOnSparkError

SECRET = b"a secret of this run, 32 bytes.."


def _child(
    pipe: Connection, connect: dict[str, Any], before: Callable | None, work: Callable, arguments: tuple
) -> None:
    try:
        if before is not None:
            before(connect["rank"])
        with Communicator.connect(**connect) as comm:
            pipe.send(("ready", None))
            pipe.send(("done", work(comm, pipe, *arguments)))
    except DLOnSparkError as error:
        pipe.send(("error", (type(error).__name__, str(error))))
    except BaseException:
        pipe.send(("error", ("unexpected", traceback.format_exc())))


class Ranks:
    """``world_size`` processes that call ``before(rank)``, meet and call ``work(comm, pipe, *arguments)``."""

    def __init__(
        self,
        world_size: int,
        work: Callable,
        *arguments: Any,
        rendezvous: str | None = None,
        deadline_s: float = 30,
        backend: str = "auto",
        algorithm: str = "auto",
        before: Callable | None = None,
        secrets: list[bytes] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        rendezvous = rendezvous or f"tcp://127.0.0.1:{free_port()}"
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            connect = {
                "rank": rank, "world_size": world_size, "rendezvous": rendezvous, "host": "127.0.0.1",
                "secret": secrets[rank] if secrets else SECRET,
                "deadline_s": deadline_s, "backend": backend, "algorithm": algorithm,
            }  # fmt: skip
            process = context.Process(target=_child, args=(theirs, connect, before, work, arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def read(self, rank: int, timeout_s: float = 120) -> tuple[str, Any]:
        """The next word of a rank."""
        assert wait([self.pipes[rank]], timeout_s), f"rank {rank} said nothing for {timeout_s} s"
        return self.pipes[rank].recv()

    def wait_ready(self) -> None:
        """All are connected."""
        for rank in range(len(self.pipes)):
            assert self.read(rank)[0] == "ready"

    def results(self) -> list[Any]:
        """What each rank returned."""
        outcomes = [self.outcome(rank) for rank in range(len(self.pipes))]
        assert all(kind == "done" for kind, _ in outcomes), outcomes
        return [value for _, value in outcomes]

    def outcome(self, rank: int) -> tuple[str, Any]:
        """("done", value) or ("error", (type, text)) of a rank."""
        while (word := self.read(rank))[0] not in {"done", "error"}:
            pass
        return word

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
        for pipe in self.pipes:
            pipe.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
