"""A job of the pipeline by SparkSubmitOperator: its result as XCom, its exit code as the task's state."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dl_on_spark_airflow.pipelines import Pipeline
from dl_on_spark_airflow.run_date import job_arguments, run_date
from dl_on_spark_airflow.spark_settings import operator_options, spark_settings

if TYPE_CHECKING:
    from airflow.sdk import Context

_BAD_INPUT, _REFUSED = 2, 3  # exit codes of the jobs; no retry changes either
_STOP_S = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class JobOperator(SparkSubmitOperator):
    """``spark-submit jobs/<job>.py`` in the pipeline's home.

    Returns the job's result (what it prints with --json), empty where the driver's output is on the cluster. Exit
    code 2 (bad input) fails at once, 3 (the gate refused) skips, everything else is retried.
    """

    def __init__(self, *, pipeline: Pipeline, job: str, **kwargs: Any) -> None:
        options = operator_options(pipeline.data, job)
        super().__init__(name=None, conn_id=pipeline.airflow.connection, **options, **kwargs)  # type: ignore[arg-type]
        self.pipeline = pipeline
        self.job = job

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job for the day of this DAG run."""
        if self.job == "publish" and context["dag_run"].run_type == "backfill":
            raise AirflowSkipException("a backfill makes past days again; the model in use stays")
        date = run_date(context, self.pipeline.airflow.timezone)
        self.application_args = job_arguments(self.job, self.pipeline.config, date, context["params"])
        self._hook = hook = self._get_hook()
        try:
            hook.submit(
                self.application,
                cwd=self.pipeline.home,
                start_new_session=True,  # a group of its own, which on_kill ends whole
                preexec_fn=_die_with_task,
            )
        except AirflowException as error:
            code = hook.exit_code()
            if code == _REFUSED:
                raise AirflowSkipException(f"the gate refused: {hook.said()}; the current model stays") from error
            if code == _BAD_INPUT:
                raise AirflowFailException(f"bad input, nothing was changed: {hook.said()}") from error
            raise AirflowException(f"exit code {code}: {hook.said()}") from error
        return hook.result

    def on_kill(self) -> None:
        """Stop the application: driver and spark-submit here, the driver on the cluster by the hook."""
        if isinstance(self._hook, JobHook):
            self._hook.stop()

    def _get_hook(self) -> JobHook:
        return JobHook(
            pipeline=self.pipeline,
            conn_id=self._conn_id,
            py_files=self.py_files,
            archives=self._archives,
            properties_file=self.properties_file,
            application_args=self.application_args,
            name=None,  # type: ignore[arg-type]
        )


class JobHook(SparkSubmitHook):
    """SparkSubmitHook that takes the cluster from pipeline.yaml, and keeps the end of what the job prints."""

    def __init__(self, *, pipeline: Pipeline, **kwargs: Any) -> None:
        self._pipeline = pipeline
        self._tail: list[str] = []
        self.result: dict[str, Any] = {}
        super().__init__(**kwargs)
        self._conf = {**spark_settings(pipeline.data, self._connection["master"]), **self._conf}

    def exit_code(self) -> int | None:
        """The job's own, also where its driver ran on YARN or Kubernetes; None while it runs."""
        if self._spark_exit_code:  # the hook reads it in what Kubernetes says
            return self._spark_exit_code
        for line in reversed(self._tail):
            _, found, code = line.partition("User application exited with ")
            digits = code.removeprefix("status ")[:1]
            if found and digits.isdigit():
                return int(digits)
        return None if self._submit_sp is None else self._submit_sp.returncode

    def said(self) -> str:
        """The job's error: the text of its last panel, or the last line."""
        panel = [line.strip("│ ") for line in self._tail if line.startswith("│")]
        return " ".join(filter(None, panel)) or next((line for line in reversed(self._tail) if line), "no output")

    def stop(self) -> None:
        """End the application, waiting a few seconds for a clean end."""
        process = self._submit_sp
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        super().on_kill()  # a driver on the cluster

    def _resolve_connection(self) -> dict[str, Any]:
        cluster = self._pipeline.data.get("cluster") or {}
        if not cluster.get("master"):
            self.get_connection(self._conn_id)  # without it, Airflow would silently submit to YARN
        found = super()._resolve_connection()
        found["master"] = cluster.get("master") or found["master"]
        found["deploy_mode"] = cluster.get("deploy_mode") or found["deploy_mode"] or "client"
        return found

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(self._kept(itr))

    def _kept(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            text = line.strip()
            self._tail = [*self._tail[-40:], text]
            if text.startswith("{") and text.endswith("}"):
                with contextlib.suppress(ValueError):
                    self.result = json.loads(text)
            yield line


def _die_with_task() -> None:
    """A killed task leaves no application behind: the kernel ends spark-submit, and with it the driver."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
