"""Runs in Airflow's own environment alone (`make airflow`): without Airflow nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile

import pytest

from tests.airflow.home import DAGS, Home

if importlib.util.find_spec("airflow") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, str(DAGS))  # as Airflow does with its DAGs folder
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-home-")  # not that of the user


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """What the README's commands would leave on a host: code, archive, a pipeline, a lake with raw flights."""
    return Home.make(tmp_path_factory.mktemp("home"))
