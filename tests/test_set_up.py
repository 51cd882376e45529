"""The set-up says in one line what a machine lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "make_venv.sh"
TOOLS = ("sh", "sed", "head", "awk", "dirname", "df", "touch")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The `bin` of a machine that has Python and a shell, but no Java."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    (folder / "python3.11").symlink_to(os.path.realpath(sys.executable))
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def refusal(machine: Path, **environment: str) -> str:
    done = subprocess.run(
        ["sh", str(SCRIPT), str(machine.parent / "venv")],
        env={"PATH": str(machine), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (machine.parent / "venv").exists()
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_machine_without_java_is_told_what_to_install(machine: Path) -> None:
    assert "needs Java 17 or newer for Spark; found none" in refusal(machine)
    assert "openjdk-17" in refusal(machine)


def test_an_old_java_is_named(machine: Path) -> None:
    program(machine, "java", "echo 'openjdk version \"11.0.22\" 2024-01-16' >&2")
    assert "found Java 11" in refusal(machine)


def test_an_old_python_is_named(machine: Path) -> None:
    (machine / "python3.11").unlink()
    program(machine, "python3", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    assert "needs Python 3.11, 3.12 or 3.13; found Python 3.9.2" in refusal(machine)
    assert "PYTHON=old is" in refusal(machine, PYTHON="old")


def test_too_little_disk_is_named(machine: Path) -> None:
    program(machine, "java", "echo 'openjdk version \"21.0.1\"' >&2")
    program(machine, "df", "echo head; echo 'disk 1 1 100 1% /'")
    assert "needs 4096 MB of free disk" in refusal(machine)
    assert "there are 100 MB" in refusal(machine)
