"""What each executor says of itself before training, in one short barrier stage.

The probe is a closure over plain values that imports nothing of this package, so that it travels by
value and runs on an executor that has neither this package nor TensorFlow, and can say so.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

# The distributions that provide the module, by the name users know.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tensorflow-macos"),
    "keras": ("keras", "keras-nightly"),
    "numpy": ("numpy",),
    "pyarrow": ("pyarrow",),
}


def own_versions() -> dict[str, str | None]:
    """Versions in this interpreter, without importing what is heavy; None where missing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        versions[name] = None
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    from dl_on_spark import __version__

    versions["dl_on_spark"] = __version__
    return versions


def make_probe(
    driver_address: str, folders: dict[str, str], readable: list[str], token: str
) -> Callable[[], dict[str, Any]]:
    """The function to run in each barrier task; it returns plain values and never raises.

    `folders` maps each writable URI to the existing folder in which the driver left a file named
    `token`; each executor must see it and be able to write beside it.
    """
    packages = PACKAGES

    def probe() -> dict[str, Any]:
        import importlib.metadata
        import platform
        import socket
        import sys
        import uuid

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        rank = context.partitionId()

        def version(distributions: tuple[str, ...]) -> str | None:
            for distribution in distributions:
                try:
                    return importlib.metadata.version(distribution)
                except importlib.metadata.PackageNotFoundError:
                    continue
            return None

        def read_failure(uri: str) -> str | None:
            try:
                import pyarrow.fs

                from dl_on_spark.lake.storage import locate

                location = locate(uri)
                filesystem, path = location.filesystem, location.path
                info = filesystem.get_file_info(path)
                if info.type == pyarrow.fs.FileType.NotFound:
                    return "not found"
                if info.type == pyarrow.fs.FileType.Directory:
                    filesystem.get_file_info(pyarrow.fs.FileSelector(path))
                else:
                    with filesystem.open_input_file(path) as stream:
                        stream.read(1)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return None

        def write_failure(folder: str) -> str | None:
            try:
                import pyarrow.fs

                from dl_on_spark.lake.storage import locate

                location = locate(folder)
                filesystem, path = location.filesystem, location.path.rstrip("/")
                if filesystem.get_file_info(f"{path}/{token}").type == pyarrow.fs.FileType.NotFound:
                    return "not the folder that the driver sees (a file it wrote there is missing)"
                name = f"{path}/{token}-{rank}-{uuid.uuid4().hex}"
                with filesystem.open_output_stream(name) as stream:
                    stream.write(b"dl_on_spark preflight")
                filesystem.delete_file(name)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return None

        def driver_failure() -> str | None:
            host, _, port = driver_address.rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=5.0).close()
            except OSError as error:
                return str(error)
            return None

        versions: dict[str, str | None] = {"python": platform.python_version()}
        versions.update({name: version(distributions) for name, distributions in packages.items()})
        try:
            import dl_on_spark

            versions["dl_on_spark"] = dl_on_spark.__version__
        except Exception:
            versions["dl_on_spark"] = None
        # Without these two the folders cannot be tried, and the run is refused anyway.
        complete = versions["dl_on_spark"] is not None and versions["pyarrow"] is not None
        gpus = context.resources().get("gpu")
        return {
            "rank": rank,
            "host": socket.gethostname(),
            "executor": context.getTaskInfos()[rank].address,
            "interpreter": sys.executable,
            "versions": versions,
            "cpus": context.cpus(),
            "gpus": [] if gpus is None else list(gpus.addresses),
            "driver": driver_failure(),
            "read": {uri: read_failure(uri) for uri in readable} if complete else {},
            "write": {uri: write_failure(folder) for uri, folder in folders.items()} if complete else {},
        }

    return probe
