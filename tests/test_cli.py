"""The command line: what ends it, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_file_that_cannot_be_written_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "dl_on_spark.cli", "package", "--output", "file/archive.zip"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Not a directory" in done.stderr and "Mend the path" in done.stderr
    assert "Traceback" not in done.stderr
