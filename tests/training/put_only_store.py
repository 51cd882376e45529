"""A store without rename, append or random writes: whole objects are put, got, listed and deleted."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from dl_on_spark.lake import storage


class PutOnlyStore(pafs.FileSystemHandler):
    """Objects by key, as an object store keeps them; a folder is a prefix that some key has."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @classmethod
    def mounted(cls, patch: pytest.MonkeyPatch) -> PutOnlyStore:
        """A new store behind every ``store://`` address."""
        store, locate = cls(), storage.locate

        def with_store(uri: Any) -> storage.Location:
            scheme, separator, key = str(uri).partition("store://")
            if scheme or not separator:
                return locate(uri)
            return storage.Location(str(uri), pafs.PyFileSystem(store), key.rstrip("/"))

        patch.setattr(storage, "locate", with_store)
        return store

    def get_type_name(self) -> str:
        return "put-only"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> pafs.FileInfo:
        if path in self.objects:
            return pafs.FileInfo(path, pafs.FileType.File, size=len(self.objects[path]))
        is_folder = any(key.startswith(f"{path}/") for key in self.objects)
        return pafs.FileInfo(path, pafs.FileType.Directory if is_folder else pafs.FileType.NotFound)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return [self._info(key) for key in self.objects if key.startswith(f"{selector.base_dir}/")]

    def open_input_stream(self, path: str) -> pa.NativeFile:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.PythonFile(io.BytesIO(self.objects[path]), mode="r")

    open_input_file = open_input_stream

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Put(self.objects, path), mode="w")

    def delete_file(self, path: str) -> None:
        del self.objects[path]

    def delete_dir(self, path: str) -> None:
        for key in [key for key in self.objects if key.startswith(f"{path}/")]:
            del self.objects[key]

    def create_dir(self, path: str, recursive: bool) -> None:
        raise NotImplementedError("no folders here")

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError("no folders here")

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("no folders here")

    def move(self, source: str, target: str) -> None:
        raise NotImplementedError("no rename here")

    def copy_file(self, source: str, target: str) -> None:
        raise NotImplementedError("no copy here")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError("no append here")


class _Put(io.BytesIO):
    """An object appears when the put ends, not before."""

    def __init__(self, objects: dict[str, bytes], key: str) -> None:
        super().__init__()
        self._objects, self._key = objects, key

    def close(self) -> None:
        if not self.closed:
            self._objects[self._key] = self.getvalue()
        super().close()

    def seekable(self) -> bool:
        return False
