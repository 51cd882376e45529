"""Training and scoring from a client of a real Spark Connect server, where there is no SparkContext."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY, spark_environment
from tests.integration.connect_server import connect_server


@pytest.mark.cluster
def test_a_connect_client_trains_two_workers_and_scores(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="needs the extra connect")
    client = REPOSITORY / "tests" / "integration" / "connect_client.py"
    with connect_server(tmp_path) as address:
        done = subprocess.run(
            [sys.executable, client, address, tmp_path],
            env=spark_environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("difference") < 1e-5
    assert found == {
        "levels": ["ok"],
        "same_history": True,
        "in_place": True,
        "columns": ["id", "a", "b", "label", "prediction"],
        "rows": 400,
    }
    assert list((tmp_path / "store").iterdir()) == []
