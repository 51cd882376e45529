"""Tasks become workers: preflight, barrier stage, one trainer process per task, driver channel."""

from dl_on_spark.launch.barrier import input_error
from dl_on_spark.launch.finding import Finding
from dl_on_spark.launch.launch import launch
from dl_on_spark.launch.preflight import examine, preflight
from dl_on_spark.launch.request import LaunchRequest, Message, WorkerContext

__all__ = ["Finding", "LaunchRequest", "Message", "WorkerContext", "examine", "input_error", "launch", "preflight"]
