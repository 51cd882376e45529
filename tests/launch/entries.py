"""Entry functions that the tests run in real worker processes."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from dl_on_spark.collectives import Communicator
from dl_on_spark.errors import CollectiveError, ModelError
from dl_on_spark.launch import WorkerContext

_PATIENCE_S = 30.0


def exchange(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Send our rank around the ring through the announced listeners, and report what we saw."""
    successor = context.peers[(context.rank + 1) % context.world_size]
    host, _, port = successor.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as link:
        link.sendall(bytes([context.rank]))
        context.listener.settimeout(_PATIENCE_S)
        incoming, _ = context.listener.accept()
        with incoming:
            incoming.settimeout(_PATIENCE_S)
            heard = incoming.recv(1)[0]
    for step in range(3):
        context.channel.send("progress", epoch=0, step=step)
    context.channel.send("metrics", epoch=0, logs={"loss": 0.5})
    return {
        "rank": context.rank,
        "heard": heard,
        "payload": payload.decode(),
        "started": time.time(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "environment": dict(os.environ),
        "cpus": context.cpus,
        "gpus": context.gpus,
        "attempt": context.attempt,
        "secret": context.secret.hex(),
        "arguments": Path("/proc/self/cmdline").read_bytes().decode().split("\0"),
    }


def leave_temporary_file(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """As AutoGraph does for each function that it converts."""
    with tempfile.NamedTemporaryFile(delete=False) as file:
        return {"file": file.name}


def fail_on_one(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Rank 1 raises; the others see the echo of it."""
    if context.rank == 1:
        context.channel.progress(7)
        raise ValueError("the model broke on rank 1")
    wait_forever()
    return {}


def fail_with_echo(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Rank 0 reports a failed exchange at once; rank 1, its cause, a moment later."""
    if context.rank == 0:
        raise CollectiveError("rank 0 lost rank 1 in allreduce 12")
    threading.Event().wait(1.0)
    raise ValueError("the cause")


def bad_model(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    raise ModelError("the model is not compiled.", fix="Call model.compile().")


def kill_one(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    if context.rank == 1:
        context.channel.send("progress", step=3)
        context.channel.close()
        print("last words of rank 1", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_forever()
    return {}


def hang_on_one(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Rank 1 stops at step 5 in a function of this name; rank 0 goes on."""
    step = 0
    while context.rank == 0 or step < 5:
        step += 1
        context.channel.progress(step)
        time.sleep(0.01)
    wait_forever()
    return {}


def sum_ranks(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """An allreduce in shared memory."""
    with Communicator.from_listener(
        context.listener, context.rank, context.peers, context.secret, deadline_s=context.deadline_s
    ) as comm:
        return {"sum": float(comm.allreduce(np.full(1000, context.rank + 1.0))[0]), "way": comm.allreduce_way(8000)}


def hang_before_exchange(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Rank 1 stops before an allreduce in which rank 0 waits."""
    with Communicator.from_listener(
        context.listener, context.rank, context.peers, context.secret, deadline_s=context.deadline_s
    ) as comm:
        context.channel.progress(5)
        if context.rank == 1:
            wait_forever()
        comm.allreduce(np.zeros(3, np.float32))
    return {}


def hang_with_child(context: WorkerContext, payload: bytes) -> dict[str, Any]:
    """Start a process of our own, say so, and never end."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    context.channel.send("log", text=f"{os.getpid()} {child.pid}")
    wait_forever()
    return {}


def wait_forever() -> None:
    threading.Event().wait(600)
