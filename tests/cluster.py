"""A real standalone Spark cluster on loopback, started from the pip package, for tests."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def spark_environment() -> dict[str, str]:
    """The environment of every Spark process of the tests: loopback, this interpreter, this checkout."""
    import pyspark

    environment = dict(os.environ)
    environment["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    environment["SPARK_LOCAL_IP"] = environment["SPARK_PUBLIC_DNS"] = "127.0.0.1"
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environment["SPARK_DAEMON_MEMORY"] = "256m"
    paths = [str(REPOSITORY), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    return environment


class StandaloneCluster:
    """One master and some workers, each a JVM of its own; use it in ``with``.

    ``gpus`` declares GPU addresses per worker, e.g. ``[["0", "1"], ["GPU-7f"]]``: Spark schedules
    them like real ones. ``hosts``: the workers' loopback addresses, where they should look like different hosts.
    ``folder`` takes logs and the executors' work folders.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        cores: int = 1,
        memory: str = "2g",
        gpus: Sequence[Sequence[str]] = (),
        hosts: Sequence[str] = (),
        deadline_s: float = 60.0,
    ) -> None:
        self.folder = folder
        self.workers = workers
        self.cores = cores
        self.memory = memory
        self.gpus = [list(addresses) for addresses in gpus]
        self.hosts = list(hosts) or ["127.0.0.1"] * workers
        self.deadline_s = deadline_s
        self.master_url = ""
        self.web_url = ""
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> StandaloneCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        deadline = time.monotonic() + self.deadline_s
        self.folder.mkdir(parents=True, exist_ok=True)
        # Port 0: the system picks free ones and the log names them, so no two runs can collide.
        master = self._spawn(
            "master", "deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"
        )
        self.master_url = self._await_log(master, r"Starting Spark master at (spark://\S+)", deadline)
        self.web_url = self._await_log(master, r"MasterWebUI.*started at (http://[^\s/]+)", deadline)
        for index in range(self.workers):
            options = ["--host", self.hosts[index], "--webui-port", "0", "--cores", str(self.cores)]
            options += ["--memory", self.memory, "--work-dir", str(self.folder / f"work-{index}")]
            if index < len(self.gpus):
                options += ["--properties-file", str(self._declare_gpus(index))]
            self._spawn(f"worker-{index}", "deploy.worker.Worker", *options, self.master_url)
        self._await_workers(deadline)

    def _spawn(self, name: str, kind: str, *options: str) -> Path:
        environment = spark_environment()
        spark_class = Path(environment["SPARK_HOME"]) / "bin" / "spark-class"
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(spark_class), f"org.apache.spark.{kind}", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one libc call, no locks
            )
        self._processes.append(process)
        return log

    def _declare_gpus(self, index: int) -> Path:
        addresses = json.dumps({"name": "gpu", "addresses": self.gpus[index]})
        script = self.folder / f"gpus-{index}.sh"
        script.write_text(f"#!/bin/sh\necho '{addresses}'\n")
        script.chmod(0o755)
        properties = self.folder / f"worker-{index}.conf"
        properties.write_text(
            f"spark.worker.resource.gpu.amount {len(self.gpus[index])}\n"
            f"spark.worker.resource.gpu.discoveryScript {script}\n"
        )
        return properties

    def _await_log(self, log: Path, pattern: str, deadline: float) -> str:
        while True:
            found = re.search(pattern, log.read_text(errors="replace"))
            if found:
                return found.group(1)
            self._check_alive(deadline, f"no {pattern!r} in {log}")
            time.sleep(0.05)

    def _await_workers(self, deadline: float) -> None:
        while self.status().get("aliveworkers", 0) < self.workers:
            self._check_alive(deadline, f"{self.workers} workers have not registered at {self.master_url}")
            time.sleep(0.1)

    def _check_alive(self, deadline: float, waiting_for: str) -> None:
        ended = [process.args for process in self._processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(
                f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
                for log in sorted(self.folder.glob("*.log"))
            )
            raise RuntimeError(f"standalone cluster: {waiting_for}; ended: {ended}\n{logs}")

    def status(self) -> dict:
        """The master's own view of workers and applications (its ``/json/`` page)."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.web_url}/json/", timeout=5) as reply:
            return json.load(reply)

    def submit(
        self,
        script: str | Path,
        *arguments: str,
        conf: Mapping[str, str] | None = None,
        py_files: Sequence[str | Path] = (),
        environment: Mapping[str, str] | None = None,
        timeout: float = 180.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``spark-submit`` in client mode against this cluster and capture its output."""
        command = self.submit_command(script, *arguments, conf=conf, py_files=py_files)
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**spark_environment(), **(environment or {})},
            cwd=REPOSITORY,
            timeout=timeout,
            check=False,
        )

    def submit_command(
        self,
        script: str | Path,
        *arguments: str,
        conf: Mapping[str, str] | None = None,
        py_files: Sequence[str | Path] = (),
    ) -> list[str]:
        """The ``spark-submit`` command line that :meth:`submit` runs (for tests that kill it)."""
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": str(self.workers * self.cores),
            "spark.ui.enabled": "false",
            **(conf or {}),
        }
        command = [str(Path(spark_environment()["SPARK_HOME"]) / "bin" / "spark-submit")]
        command += ["--master", self.master_url]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        if py_files:
            command += ["--py-files", ",".join(str(path) for path in py_files)]
        return [*command, str(script), *arguments]

    def stop(self) -> None:
        """End every JVM of this cluster and what they started."""
        family: list[psutil.Process] = []
        for process in self._processes:
            try:
                parent = psutil.Process(process.pid)
                family += [parent, *parent.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        for member in family:
            try:
                member.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=10)
        for process in self._processes:
            process.wait(timeout=10)
        self._processes.clear()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
