"""Tasks become workers: preflight, barrier stage, one trainer process per task, driver channel."""

from dl_on_spark.launch.barrier import input_error
from dl_on_spark.launch.launch import launch
from dl_on_spark.launch.preflight import Finding, preflight
from dl_on_spark.launch.request import LaunchRequest, Message, WorkerContext

__all__ = ["Finding", "LaunchRequest", "Message", "WorkerContext", "input_error", "launch", "preflight"]
