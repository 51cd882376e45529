"""The archive for `spark-submit --py-files`: this package and the user's own folders."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import dl_on_spark
from dl_on_spark.errors import ConfigError

# Fixed, so that the same code gives the same bytes.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def build_archive(output: Path, include: Sequence[Path] = ()) -> list[str]:
    """Write `output` (.zip) with `dl_on_spark` and the folders of `include`, and return the names in it.

    The bytes depend only on the files' names and contents. The archive is complete or absent.
    """
    roots = [Path(dl_on_spark.__file__).parent, *include]
    entries: dict[str, Path] = {}
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root} is not a folder.", fix="Name a folder of Python code with --include.")
        for file in sorted(root.rglob("*")):
            parts = file.relative_to(root).parts
            if file.is_file() and "__pycache__" not in parts and not any(part.startswith(".") for part in parts):
                entries["/".join((root.name, *parts))] = file
    partial = output.with_suffix(".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, file in sorted(entries.items()):
                archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), file.read_bytes(), zipfile.ZIP_DEFLATED)
        partial.replace(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error}).", fix="Choose another --output.") from error
    return sorted(entries)
