"""The DAG: wait for the sources, ETL, validate, train, evaluate, publish, score, report."""

from __future__ import annotations

import datetime
from typing import Any

from airflow.sdk import DAG, Asset, CronDataIntervalTimetable, Param, chain

from dl_on_spark_airflow.alerts import alert
from dl_on_spark_airflow.job_operator import JobOperator
from dl_on_spark_airflow.pipelines import Pipeline
from dl_on_spark_airflow.sources import SourcesSensor

_MOST_DELAY = datetime.timedelta(hours=1)


def nightly_dag(pipeline: Pipeline) -> DAG:
    """The DAG of one pipeline.yaml; its id is the pipeline's name."""
    settings, data = pipeline.airflow, pipeline.data
    tell = alert(settings.on_failure)
    dag = DAG(
        dag_id=pipeline.name,
        description=f"Trains and scores {pipeline.name} nightly ({pipeline.config})",
        schedule=_schedule(pipeline),
        start_date=datetime.datetime.combine(settings.start_date, datetime.time(), datetime.UTC),
        catchup=False,
        max_active_runs=1,  # a day's training sees the tables of the days before it
        params=_form(),
        tags=["dl_on_spark"],
        default_args={
            "retries": settings.retries,
            "retry_delay": datetime.timedelta(seconds=settings.retry_delay_s),
            "retry_exponential_backoff": True,
            "max_retry_delay": _MOST_DELAY,
            "on_failure_callback": tell,
        },
    )

    def job(task: str, name: str, hours: float = settings.job_timeout_h, **options: Any) -> JobOperator:
        timeout = datetime.timedelta(hours=hours)
        return JobOperator(task_id=task, pipeline=pipeline, job=name, execution_timeout=timeout, **options)

    with dag:
        wait = SourcesSensor(
            task_id="wait_for_source",
            pipeline=pipeline,
            poke_interval=60,
            timeout=settings.wait_timeout_h * 3600,
        )
        features = Asset(pipeline.uri((data.get("etl") or {}).get("table", "tables/features")))
        scores = Asset(pipeline.uri((data.get("scoring") or {}).get("table", "tables/scores")))
        chain(
            wait,
            job("etl", "etl", outlets=[features]),
            job("validate", "doctor"),
            job("train", "train", settings.train_timeout_h, pool=settings.pool),
            job("evaluate", "evaluate"),
            job("publish", "publish", on_skipped_callback=tell),
            # Refused by the gate, publish is skipped, and the day is scored with the model before.
            job("score", "score", outlets=[scores], trigger_rule="none_failed"),
            job("report", "report"),
        )
    return dag


def _schedule(pipeline: Pipeline) -> Any:
    settings = pipeline.airflow
    if settings.assets:
        return [Asset(uri) for uri in settings.assets]
    if settings.schedule is None:
        return None
    # A plain cron string would give the day of the run itself, whose data is not whole yet.
    return CronDataIntervalTimetable(settings.schedule, timezone=settings.timezone)


def _form() -> dict[str, Param]:
    """The trigger form."""
    text = ["null", "string"]
    return {
        "date": Param(None, type=text, format="date", title="Day", description="Empty: that of the data interval."),
        "sync": Param(
            None,
            type=text,
            title="Synchronization",
            description="Empty: as in pipeline.yaml; allreduce, local_sgd:every=16 and so on.",
        ),
        "force": Param(
            None,
            type=text,
            title="Publish although the gate refuses",
            description="The reason, which is recorded with the model. Empty: the gate decides.",
        ),
    }
