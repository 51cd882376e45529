"""What each executor says of itself before training, in one short barrier stage.

The probe is a closure over plain values that imports nothing of this package, so that it travels by
value and runs on an executor that has neither this package nor TensorFlow, and can say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dl_on_spark.launch.machine import machine_facts, peer_check

# The distributions that provide the module, by the name users know.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tensorflow-macos"),
    "keras": ("keras", "keras-nightly"),
    "numpy": ("numpy",),
    "pyarrow": ("pyarrow",),
}


def own_versions() -> dict[str, str | None]:
    """Versions in this interpreter, without importing what is heavy; None where missing."""
    return _versions_check(PACKAGES)()


def make_probe(
    driver_address: str, folders: dict[str, str], readable: list[str], token: str, *, peers: bool = False
) -> Callable[[], dict[str, Any]]:
    """The function to run in each barrier task; it returns plain values and never raises.

    `folders` maps each writable URI to the existing folder in which the driver left a file named
    `token`; each executor must see it and be able to write beside it. With `peers` the tasks also try
    to reach each other.
    """
    versions_here, driver_failure = _versions_check(PACKAGES), _driver_check(driver_address)
    read_failure, write_failure = _read_check(), _write_check(token)
    machine, peers_of = machine_facts(), peer_check() if peers else (lambda _context, _host: {})

    def probe() -> dict[str, Any]:
        import socket
        import sys

        from pyspark import BarrierTaskContext, TaskContext

        context = TaskContext.get()
        assert context is not None
        rank = context.partitionId()
        versions = versions_here()
        # Without these two the folders cannot be tried, and the run is refused anyway.
        complete = versions["dl_on_spark"] is not None and versions["pyarrow"] is not None
        gpus = context.resources().get("gpu")
        # Outside a barrier stage tasks do not know each other.
        barrier = isinstance(context, BarrierTaskContext)
        address = context.getTaskInfos()[rank].address if barrier else socket.gethostname()
        name, _, port = address.rpartition(":")
        return {
            "rank": rank,
            "host": socket.gethostname(),
            "executor": address,
            "machine": machine(),
            "peers": peers_of(context, name if port.isdigit() else address) if barrier else {},
            "interpreter": sys.executable,
            "versions": versions,
            "cpus": context.cpus(),
            "gpus": [] if gpus is None else list(gpus.addresses),
            "driver": driver_failure(),
            "read": {uri: read_failure(uri) for uri in readable if complete},
            "write": {uri: write_failure(folder) for uri, folder in folders.items() if complete},
        }

    return probe


def _versions_check(packages: dict[str, tuple[str, ...]]) -> Callable[[], dict[str, str | None]]:
    def versions_here() -> dict[str, str | None]:
        import importlib.metadata
        import platform

        versions: dict[str, str | None] = {"python": platform.python_version()}
        for name, distributions in packages.items():
            versions[name] = None
            for distribution in distributions:
                try:
                    versions[name] = importlib.metadata.version(distribution)
                    break
                except importlib.metadata.PackageNotFoundError:
                    continue
        try:
            import dl_on_spark

            versions["dl_on_spark"] = dl_on_spark.__version__
        except Exception:
            versions["dl_on_spark"] = None
        return versions

    return versions_here


def _driver_check(driver_address: str) -> Callable[[], str | None]:
    def driver_failure() -> str | None:
        import socket

        host, _, port = driver_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError as error:
            return str(error)
        return None

    return driver_failure


def _read_check() -> Callable[[str], str | None]:
    def read_failure(uri: str) -> str | None:
        try:
            import pyarrow.fs

            from dl_on_spark.lake.storage import locate

            location = locate(uri)
            info = location.filesystem.get_file_info(location.path)
            if info.type == pyarrow.fs.FileType.NotFound:
                return "not found"
            if info.type == pyarrow.fs.FileType.Directory:
                location.filesystem.get_file_info(pyarrow.fs.FileSelector(location.path))
            else:
                with location.filesystem.open_input_file(location.path) as stream:
                    stream.read(1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    return read_failure


def _write_check(token: str) -> Callable[[str], str | None]:
    def write_failure(folder: str) -> str | None:
        try:
            import uuid

            import pyarrow.fs

            from dl_on_spark.lake.storage import locate

            location = locate(folder)
            files, base = location.filesystem, location.path.rstrip("/")
            if files.get_file_info(f"{base}/{token}").type == pyarrow.fs.FileType.NotFound:
                return "not the folder that the driver sees (a file it wrote there is missing)"
            name = f"{base}/{token}-{uuid.uuid4().hex}"
            with files.open_output_stream(name) as stream:
                stream.write(b"dl_on_spark preflight")
            files.delete_file(name)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    return write_failure
