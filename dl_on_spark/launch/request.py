"""What the driver asks for, what a worker is given, and what workers tell the driver."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dl_on_spark.errors import ConfigError

if TYPE_CHECKING:
    from dl_on_spark.launch.worker_channel import WorkerChannel


@dataclass(frozen=True)
class LaunchRequest:
    """One attempt at a distributed run.

    ``entry`` is ``module:function``, called in every worker as ``function(context, payload)`` and
    returning a JSON-able dict. ``deadline_s`` bounds the silence of a worker and the time between two
    steps of it. ``env`` is added to the workers' environment and wins over what the launcher sets.
    """

    num_workers: int
    entry: str
    payload: bytes = field(default=b"", repr=False)
    attempt: int = 1
    gpus_per_worker: int = 0
    cpus_per_worker: int | None = None
    deadline_s: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, colon, function = self.entry.partition(":")
        if not (module and colon and function):
            raise ConfigError(f"entry {self.entry!r} names no function.", fix="Write it as 'module:function'.")
        if self.num_workers < 1:
            raise ConfigError(f"num_workers={self.num_workers}.", fix="Ask for at least one worker.")
        if self.gpus_per_worker < 0:
            raise ConfigError(f"gpus_per_worker={self.gpus_per_worker}.", fix="Use 0 for CPUs only.")
        if self.cpus_per_worker is not None and self.cpus_per_worker < 1:
            raise ConfigError(
                f"cpus_per_worker={self.cpus_per_worker}.",
                fix="Ask for at least one, or leave it out to take spark.task.cpus.",
            )
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s}.", fix="Give a number of seconds above 0.")


@dataclass(frozen=True)
class Message:
    """One message of a worker; ``time`` is the driver's clock (seconds since the epoch) at arrival."""

    rank: int
    kind: str
    fields: dict[str, Any]
    time: float


@dataclass(frozen=True)
class WorkerContext:
    """What the entry function of a worker knows about its place in the run.

    ``listener`` is bound and listening at ``peers[rank]``; ``secret`` authenticates peers to each
    other; ``gpus`` are the device addresses Spark assigned (already in CUDA_VISIBLE_DEVICES).
    """

    rank: int
    world_size: int
    host: str
    attempt: int
    listener: socket.socket
    peers: list[str]
    secret: bytes = field(repr=False)
    cpus: int
    gpus: list[str]
    deadline_s: float
    channel: WorkerChannel
