"""Every command and every Python block of the README is run, or is one that CI itself runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY, StandaloneCluster, spark_environment
from tests.integration.conftest import SMALL

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# What the commands say of a cluster that is not here; the rest of each command is run as it is written.
CLUSTER_OPTIONS = {
    "--master",
    "--deploy-mode",
    "--archives",
    "--num-executors",
    "--executor-cores",
    "--executor-memory",
}


PLANNING = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")


def commands(text: str = README) -> list[list[str]]:
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"\s#.*", "", line))
            if words:
                found.append(words)
    return found


def run(words: list[str], folder: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**spark_environment(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def on(cluster: StandaloneCluster, words: list[str]) -> list[str]:
    """The same spark-submit on the cluster of the tests, over few days."""
    kept, skip = [], False
    for option, value in zip(words[1:], [*words[2:], ""], strict=True):
        if skip:
            skip = False
        elif option in CLUSTER_OPTIONS or (option == "--conf" and not value.startswith("spark.dynamicAllocation")):
            skip = True
        else:
            kept.append(option)
    small = [argument for override in SMALL for argument in ("--set", override)]
    submit = cluster.submit_command("JOB", conf={"spark.driver.memory": "1g"})[:-1]
    return [*submit, *kept, *small]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, raw_flights: Path) -> Path:
    """A folder like a checkout in which the demo's raw files lie."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "schemas", "jobs", "dl_on_spark"):
        (folder / name).symlink_to(REPOSITORY / name)
    lake = folder / "demo_output" / "lake"
    lake.mkdir(parents=True)
    (lake / "raw").symlink_to(raw_flights)
    return folder


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_every_command_of_the_readme_runs(checkout: Path, standalone_cluster: StandaloneCluster) -> None:
    ci = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    submitted = []
    for words in commands():
        if words[0] == "make":
            assert shlex.join(words) in ci
        elif words[:2] == ["dl-on-spark", "checkpoints"]:
            assert "verified" in run(words, checkout).stdout
        elif words[:2] == ["dl-on-spark", "package"]:
            run(words, checkout)
        elif words[0] == "spark-submit":
            script = next(word for word in words if word.startswith("jobs/"))
            if script == "jobs/etl.py":
                words[words.index("--start-date") + 1] = "2013-06-10"
                small = [argument for override in SMALL for argument in ("--set", override)]
                run([*words, *small], checkout)
            else:
                run(on(standalone_cluster, words), checkout)
            submitted.append(script)
        else:
            assert words[:2] == ["dl-on-spark", "rollback"], words  # run in test_spark_submit, after two versions
    assert submitted.count("jobs/train.py") == 3


@pytest.mark.timeout(300)
def test_the_python_block_of_the_readme_runs(checkout: Path) -> None:
    assert (checkout / "demo_output" / "lake" / "tables").is_dir(), "the commands run first"
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = run([sys.executable, "-c", block], checkout)
    assert "val_auc" in done.stdout


@pytest.mark.timeout(300)
def test_the_commands_of_the_page_on_planning_run(checkout: Path) -> None:
    assert (checkout / "demo_output" / "lake" / "tables").is_dir(), "the commands of the README run first"
    plan, network = commands(PLANNING)
    small = [argument for override in SMALL for argument in ("--set", override)]
    assert "Take " in run([*plan, *small], checkout).stdout
    assert "latency" in run(network, checkout).stdout
    assert all((checkout / name).stat().st_size for name in ("plan.png", "network.png", "network.json"))
