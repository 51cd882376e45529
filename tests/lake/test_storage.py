"""Storage: the same few operations on local paths and URIs, and files that are complete or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dl_on_spark.errors import InputError
from dl_on_spark.lake import storage


@pytest.mark.parametrize("as_uri", [str, lambda path: path.as_uri(), lambda path: f"{path}/", Path])
def test_a_path_with_spaces_works_as_text_as_uri_and_with_a_trailing_slash(tmp_path, as_uri) -> None:
    folder = tmp_path / "my lake #1" / "a=b c"
    uri = as_uri(folder)
    assert not storage.exists(uri)
    assert storage.list_files(uri) == []
    storage.write_bytes(storage.join(uri, "deep", "file.bin"), b"abc")
    assert (folder / "deep" / "file.bin").read_bytes() == b"abc"
    assert storage.read_bytes(storage.join(uri, "deep/file.bin")) == b"abc"
    assert storage.list_files(uri) == ["deep/file.bin"]
    assert storage.list_files(uri, recursive=False) == []
    assert storage.local_path(uri) == folder
    storage.delete(uri)
    storage.delete(uri)
    assert not folder.exists()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    target = tmp_path / "current.json"
    storage.write_bytes(target, b"old")

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        storage.write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["current.json"]


def test_an_address_that_no_file_system_reads_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="ftp://host/x") as caught:
        storage.locate("ftp://host/x")
    assert caught.value.fix


def test_a_missing_file_is_the_usual_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(tmp_path / "none")
