"""A process that replaces a partition and is killed at a chosen point: ``killed_writer.py ROOT VALUE POINT``.

Points: ``writing``, ``written``, ``before-exchange``, ``after-exchange``, ``set-aside`` (no exchange, between
the two renames), ``published`` (no exchange, after them), ``cleaning`` (after the
commit), ``random`` (loops until killed, with and without
exchange in turns).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dl_on_spark.lake import staging

FILES, ROWS = 3, 50


def replace(root: Path, value: int, name: str = "date=2013-06-01", *, die: bool = False) -> None:
    """One partition of `FILES` files, all of whose cells are `value`."""
    with staging.staging(root) as staged:
        folder = staged.new / name
        folder.mkdir(parents=True)
        for n in range(FILES):
            pq.write_table(pa.table({"x": [value] * ROWS}), folder / f"part-{n:05d}.parquet")
            if die:
                kill()
        staged.commit([name])


def kill(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(root: Path, value: int, point: str) -> None:
    exchange, move = staging._exchange, staging._move
    if point == "random":
        for n in count():
            staging._exchange = exchange if n % 2 else lambda *_: False
            replace(root, value + n)
            print(value + n, flush=True)
    if point == "written":
        staging.Staging.commit = kill
    elif point == "before-exchange":
        staging._exchange = kill
    elif point == "after-exchange":
        staging._exchange = lambda a, b: (exchange(a, b), kill())
    elif point == "set-aside":
        staging._exchange = lambda *_: False
        staging._move = lambda a, b: (move(a, b), kill())
    elif point == "published":
        staging._exchange = lambda *_: False
        staging._sync = lambda path: kill() if path == root else None
    elif point == "cleaning":
        shutil.rmtree = kill
    replace(root, value, die=point == "writing")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
