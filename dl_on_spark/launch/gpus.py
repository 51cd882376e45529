"""Which GPUs a worker sees: those Spark assigned to its task, and no other."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from dl_on_spark.errors import PreflightError

_NVIDIA_SMI_TIMEOUT_S = 10.0


def visible_devices(addresses: Sequence[str]) -> dict[str, str]:
    """The environment that shows a process the devices at `addresses` (indices, UUIDs or MIG ids).

    Spark's discovery scripts ask nvidia-smi, which numbers by PCI bus; CUDA by default numbers the
    fastest first. "-1" is CUDA's own way to say none: an empty value is read as unset by some tools.
    """
    if not addresses:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(addresses), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def local_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this machine that this process may use: CUDA_VISIBLE_DEVICES, else nvidia-smi's.

    For a ``local[n]`` master only, where Spark itself assigns no devices.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [address.strip() for address in visible.split(",") if address.strip() not in ("", "-1")]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def share_of_rank(gpus: Sequence[str], rank: int, gpus_per_worker: int) -> list[str]:
    """The devices of `rank` when all workers share one machine: contiguous, disjoint shares."""
    first = rank * gpus_per_worker
    share = list(gpus[first : first + gpus_per_worker])
    if len(share) < gpus_per_worker:
        raise PreflightError(
            f"worker {rank} needs {gpus_per_worker} GPUs; this machine shows {len(gpus)} in all.",
            fix="Ask for fewer workers or gpus_per_worker, or look at CUDA_VISIBLE_DEVICES.",
        )
    return share
