"""Which days a job works on, and where a night's run lies: the same answer for every job."""

from __future__ import annotations

import datetime
import logging
import re
from dataclasses import dataclass

from dl_on_spark.config import PipelineConfig
from dl_on_spark.errors import ConfigError
from dl_on_spark.lake import Snapshot, Table, open_table
from dl_on_spark.lake.ddl import quoted

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")


@dataclass(frozen=True)
class DaySplit:
    """Training days and the held-out days after them, all inclusive.

    Whole days are held out, not rows: a model that is judged on rows of days it has seen looks better
    than it will be tomorrow.
    """

    first: datetime.date
    last: datetime.date
    holdout_first: datetime.date
    holdout_last: datetime.date

    @classmethod
    def of(cls, config: PipelineConfig, date: datetime.date) -> DaySplit:
        """Hold out the last `holdout_days` up to `date`; train on the `days` before them."""
        training = config.training
        try:
            holdout_first = date - datetime.timedelta(days=training.holdout_days - 1)
            last = holdout_first - datetime.timedelta(days=1)
            first = last - datetime.timedelta(days=training.days - 1)
        except OverflowError as error:
            raise ConfigError(
                f"{date} less training.days={training.days} and training.holdout_days={training.holdout_days} "
                "is before the first day of the calendar.",
                fix="Mend --date or these two entries.",
            ) from error
        return cls(first, last, holdout_first, date)

    def training_filter(self, column: str) -> str:
        """`where` expression of the training days."""
        return _between(column, self.first, self.last)

    def holdout_filter(self, column: str) -> str:
        """`where` expression of the held-out days."""
        return _between(column, self.holdout_first, self.holdout_last)


def day_tables(config: PipelineConfig, days: DaySplit) -> tuple[Table, Table]:
    """The pipeline's table on the training days, and on the held-out ones."""
    table = open_table(config.data_path(config.etl.table))
    chosen = table if config.training.where is None else table.where(config.training.where)
    column = config.date_column
    return chosen.where(days.training_filter(column)), chosen.where(days.holdout_filter(column))


def warn_of_days(snapshot: Snapshot, column: str, first: datetime.date, last: datetime.date) -> None:
    """Warn of days from `first` to `last` without a partition in `snapshot`, and of partitions that are no day.

    A gap can be right (no flights on that day), so it is no error. Tables not partitioned by `column` are
    left alone: only their rows know the days.
    """
    found = {str(file.partition[column]) for file in snapshot.files if column in file.partition}
    if not found:
        return
    asked = [str(first + datetime.timedelta(days=i)) for i in range((last - first).days + 1)]
    missing = [day for day in asked if day not in found]
    if missing:
        logger.warning(
            "%s has no rows for %d of the %d days %s to %s: %s. Run the ETL for them, unless they are empty.",
            snapshot.uri,
            len(missing),
            len(asked),
            first,
            last,
            _shortened(missing),
        )
    if str(snapshot.table_schema.field(column).type) == "string":
        logger.warning(
            "%s: not every partition %s=... is a day (YYYY-MM-DD), so all are read as text; the others are left out. "
            "Remove or rename those folders.",
            snapshot.uri,
            column,
        )


def run_folder(config: PipelineConfig, date: datetime.date, run_name: str | None = None) -> str:
    """Folder of a training run (checkpoints, model, metrics): one a date and strategy unless named.

    Raises `ConfigError` for a name that leads out of the pipeline's folder of runs.
    """
    if run_name is None:
        strategy = config.training.sync.replace(":", "-").replace("=", "-").replace(",", "-")
        run_name = f"{date.isoformat()}-{strategy}"
    elif not _NAME.fullmatch(run_name):
        raise ConfigError(f"--run-name {run_name!r} is no folder's name.", fix="Use letters, digits, and any of ._-=")
    return f"{config.data_path(config.training.checkpoint_dir)}/{config.name}/{run_name}"


def _shortened(days: list[str], most: int = 10) -> str:
    more = len(days) - most
    return ", ".join(days[:most]) + (f" and {more} more" if more > 0 else "")


def day_filter(column: str, day: datetime.date) -> str:
    """`where` expression of one day."""
    return _between(column, day, day)


def _between(column: str, first: datetime.date, last: datetime.date) -> str:
    # As it stands where it may: the text is part of a run's identity.
    name = column if _PLAIN.fullmatch(column) else quoted(column)
    return f"{name} between '{first.isoformat()}' and '{last.isoformat()}'"
