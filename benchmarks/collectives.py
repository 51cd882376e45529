"""Allreduce among processes of this machine, through shared memory and TCP, beside its limits, in one run.

Limits: memcpy inside one process, and a one-way stream over loopback TCP between two. An
allreduce of n bytes moves n bytes out of and n bytes into each rank, so it cannot be as fast as
the one-way stream on two busy cores. Run: python benchmarks/collectives.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import socket
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from dl_on_spark.collectives import Communicator

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}
DEADLINE_S = 60.0


def repeats(nbytes: int) -> int:
    return max(7, min(1000, (256 << 20) // nbytes))


def rank_main(
    rank: int, ranks: int, address: str, secret: bytes, backend: str, algorithm: str, pipe: Connection
) -> None:
    """Check each size's result on data that differs by rank, then time it."""
    seconds = {}
    with Communicator.connect(
        rank, ranks, f"tcp://{address}", secret, backend, algorithm, deadline_s=DEADLINE_S
    ) as comm:
        for name, nbytes in SIZES.items():
            base = np.arange(nbytes // 4, dtype=np.float32) % 1000
            result = comm.allreduce(base + rank)
            if not np.array_equal(result, base * ranks + sum(range(ranks))):
                raise SystemExit(f"rank {rank}: wrong result at {name}")
            values = np.zeros_like(base)
            times = []
            comm.barrier()
            for _ in range(repeats(nbytes)):
                start = time.perf_counter()
                comm.allreduce(values)
                times.append(time.perf_counter() - start)
            seconds[name] = statistics.median(times)
    pipe.send(seconds)


def allreduce_seconds(ranks: int, backend: str, algorithm: str) -> dict[str, float]:
    """Median seconds by size, of the slowest rank."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    secret = secrets.token_bytes(32)
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        arguments = (rank, ranks, address, secret, backend, algorithm, theirs)
        processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        results = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(DEADLINE_S)
    return {name: max(result[name] for result in results) for name in SIZES}


def drain(port: int) -> None:
    """The receiving end of the stream: answers each message with one byte."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as sock:
        for nbytes in SIZES.values():
            place = memoryview(bytearray(nbytes))
            for _ in range(repeats(nbytes)):
                got = 0
                while got < nbytes:
                    got += sock.recv_into(place[got:])
                sock.sendall(b"k")


def stream_seconds() -> dict[str, float]:
    """Median seconds to send by size over loopback to another process, its answer included."""
    seconds = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        receiver = multiprocessing.get_context("spawn").Process(
            target=drain, args=(server.getsockname()[1],), daemon=True
        )
        receiver.start()
        sock, _ = server.accept()
        with sock:
            sock.settimeout(DEADLINE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, nbytes in SIZES.items():
                data = bytes(nbytes)
                times = []
                for _ in range(repeats(nbytes)):
                    start = time.perf_counter()
                    sock.sendall(data)
                    sock.recv(1)
                    times.append(time.perf_counter() - start)
                seconds[name] = statistics.median(times)
        receiver.join(DEADLINE_S)
    return seconds


def memcpy_seconds() -> dict[str, float]:
    """Median seconds of a copy by size."""
    seconds = {}
    for name, nbytes in SIZES.items():
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        times = []
        for _ in range(repeats(nbytes)):
            start = time.perf_counter()
            np.copyto(target, source)
            times.append(time.perf_counter() - start)
        seconds[name] = statistics.median(times)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--algorithm", nargs="*", default=["auto", "recursive_doubling", "ring"])
    options = parser.parse_args()
    rows = {"allreduce shm": allreduce_seconds(options.ranks, "shm", "auto")}
    for name in options.algorithm:
        rows[f"allreduce tcp {name}"] = allreduce_seconds(options.ranks, "tcp", name)
    rows["loopback stream, one way"] = stream_seconds()
    rows["memcpy"] = memcpy_seconds()
    print(f"{options.ranks} ranks; median time and bytes / time")
    print("".join([" " * 30, *(f"{name:>24}" for name in SIZES)]))
    for label, seconds in rows.items():
        cells = [f"{seconds[n] * 1e3:10.3f} ms {SIZES[n] / seconds[n] / 1e9:5.2f} GB/s" for n in SIZES]
        print("".join([f"{label:30}", *(f"{cell:>24}" for cell in cells)]))


if __name__ == "__main__":
    main()
