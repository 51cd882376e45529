"""The command line: what ends it, and with which exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("PermissionError(13, 'Permission denied', '/lake/metrics.json')", 2, "/lake/metrics.json: Permission denied."),
        ("OSError(28, 'No space left on device')", 2, "No space left on device"),
        ("ConnectionRefusedError(111, 'Connection refused')", 1, "Traceback"),
    ],
)
def test_a_path_that_a_job_cannot_use_is_one_message_and_exit_code_2(raised: str, code: int, said: str) -> None:
    program = f"from dl_on_spark import cli\ndef app(**_):\n    raise {raised}\ncli.app = app\ncli.main([])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)
