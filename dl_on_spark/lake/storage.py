"""The one door to storage: local folders and every URI that pyarrow.fs reads.

A file appears complete or not at all: on a local disk through a temporary name beside it, on an
object store because a put is atomic. Nothing here needs rename or random writes from a store.
"""

from __future__ import annotations

import os
import posixpath
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs as pafs

from dl_on_spark.errors import InputError

# What Hadoop, and so Spark, calls the store that all others call s3.
_OF_HADOOP = re.compile(r"^s3[an]://")
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Location:
    """A place in storage: ``path`` is what ``filesystem`` calls it, without a trailing slash."""

    uri: str
    filesystem: Any  # pyarrow.fs.FileSystem
    path: str


def locate(uri: PathLike) -> Location:
    """Find the file system of a local path or URI.

    A local path may hold spaces, a trailing slash or a leading ``~``; s3a:// is s3://. Raises `InputError` for a
    scheme that pyarrow.fs does not read.
    """
    text = os.fspath(uri)
    local = local_path(text)
    if local is not None:
        return Location(text, pafs.LocalFileSystem(), str(local))
    try:
        filesystem, path = pafs.FileSystem.from_uri(_OF_HADOOP.sub("s3://", text))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise InputError(
            f"{text}: no file system reads this address ({error}).",
            fix="Use a local path, or an s3://, gs://, abfss:// or hdfs:// URI.",
        ) from error
    return Location(text, filesystem, path.rstrip("/"))


def local_path(uri: PathLike) -> Path | None:
    """The local path behind `uri`; None when it is on another file system."""
    text = os.fspath(uri)
    if text.startswith("file:"):
        return Path(unquote(urlsplit(text).path)).absolute()
    return None if "://" in text else Path(text).expanduser().absolute()


def join(uri: PathLike, *parts: str) -> str:
    """`uri` with `parts` below it."""
    return posixpath.join(os.fspath(uri).rstrip("/") or "/", *parts)


def exists(uri: PathLike) -> bool:
    """Whether a file or folder is there."""
    place = locate(uri)
    return bool(place.filesystem.get_file_info(place.path).type != pafs.FileType.NotFound)


def read_bytes(uri: PathLike) -> bytes:
    """The whole file; raises `FileNotFoundError` where there is none."""
    place = locate(uri)
    try:
        with place.filesystem.open_input_stream(place.path) as stream:
            return bytes(stream.read())
    except NotADirectoryError as error:  # a part of the path is a file
        raise FileNotFoundError(*error.args) from error


def write_bytes(uri: PathLike, data: bytes | bytearray | memoryview) -> None:
    """Write a file that is complete or absent, also after a kill or a power cut."""
    place = locate(uri)
    if not isinstance(place.filesystem, pafs.LocalFileSystem):
        with place.filesystem.open_output_stream(place.path) as stream:
            stream.write(data)
        return
    target = Path(place.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def list_files(uri: PathLike, recursive: bool = True) -> list[str]:
    """Paths below the folder `uri`, relative to it, sorted; empty where there is no folder."""
    place = locate(uri)
    selector = pafs.FileSelector(place.path, allow_not_found=True, recursive=recursive)
    found = place.filesystem.get_file_info(selector)
    prefix = len(place.path.rstrip("/")) + 1
    return sorted(info.path[prefix:] for info in found if info.type == pafs.FileType.File)


def delete(uri: PathLike) -> None:
    """Remove a file or a folder with all that is in it; nothing happens where there is none."""
    place = locate(uri)
    info = place.filesystem.get_file_info(place.path)
    if info.type == pafs.FileType.Directory:
        place.filesystem.delete_dir(place.path)
    elif info.type == pafs.FileType.File:
        place.filesystem.delete_file(place.path)
