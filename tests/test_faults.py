"""A cell of the fault matrix, and what the page on recovery tells to run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from benchmarks.faults import Matrix
from dl_on_spark.cli import app
from tests.cluster import REPOSITORY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.faults
def test_a_cell_of_the_fault_matrix_survives_and_the_page_on_recovery_says_how_to_look(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = Matrix(spark, tmp_path, seed=3)
    outcome = matrix.run("gossip:every=4", "flipped", "collective")  # killed in an exchange, the checkpoint damaged
    assert (outcome.lost, outcome.how) == ("", "resumed"), outcome
    assert outcome.recovery_s is not None
    text = (REPOSITORY / "docs" / "recovery.md").read_text(encoding="utf-8")
    verify, make = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path / "cell-2")
    shown = CliRunner().invoke(app, shlex.split(verify)[1:])
    assert shown.exit_code == 0 and "verified" in shown.output, shown.output
    command = [*shlex.split(make), "--dry-run", "--old-file=venv"]
    planned = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "-m benchmarks.faults --cells 10 --seed 1" in planned
