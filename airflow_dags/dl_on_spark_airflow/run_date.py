"""Which day a DAG run works on, and with which options; Airflow 3 gives a manual run no `ds`."""

from __future__ import annotations

import datetime
import zoneinfo
from collections.abc import Mapping
from typing import Any


def run_date(context: Mapping[str, Any], timezone: str) -> str:
    """YYYY-MM-DD: the form's date, that of the upstream event, the day the data interval begins, or yesterday."""
    given = context["params"].get("date")
    if given:
        return str(given)
    events = context.get("triggering_asset_events") or {}
    named = [event.extra["date"] for found in events.values() for event in found if (event.extra or {}).get("date")]
    if named:
        return str(max(named))
    zone = zoneinfo.ZoneInfo(timezone)
    interval = context.get("data_interval_start")
    if interval is not None and not events:
        return str(interval.astimezone(zone).date())
    yesterday = context["dag_run"].run_after.astimezone(zone) - datetime.timedelta(days=1)
    return str(yesterday.date())


def job_arguments(job: str, config: str, date: str, params: Mapping[str, Any]) -> list[str]:
    """The words after the job's script. ``params``: those of the trigger form."""
    words = ["--config", config]
    if job != "doctor":
        words += ["--date", date]
    if params.get("sync"):
        words += ["--set", f"training.sync={params['sync']}"]
    if job == "publish" and params.get("force"):
        words += ["--force", params["force"]]
    return [*words, "--json"]
