"""The command `dl-on-spark`: one subcommand a job; the scripts in `jobs/` call the same ones."""

from __future__ import annotations

import datetime
import json
import logging
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dl_on_spark.config import PipelineConfig, load_config
from dl_on_spark.errors import Cancelled, ConfigError, DLOnSparkError, InputError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = typer.Typer(
    name="dl-on-spark",
    help="Train TensorFlow/Keras models in place on the tables of a Spark cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

table = typer.Typer(name="table", help="Look at a table on the lake.", no_args_is_help=True)
app.add_typer(table)
bench = typer.Typer(name="bench", help="Measure this cluster.", no_args_is_help=True)
app.add_typer(bench)
checkpoints = typer.Typer(name="checkpoints", help="Look at what a run has saved.", no_args_is_help=True)
app.add_typer(checkpoints)
models = typer.Typer(name="models", help="Look at the published versions, and choose one.", no_args_is_help=True)
app.add_typer(models)

Config = Annotated[Path, typer.Option("--config", help="The pipeline.yaml.")]
Date = Annotated[str, typer.Option("--date", help="The day the job works for, YYYY-MM-DD.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override: training.epochs=5. May be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result and errors.")]


@app.command()
def etl(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    start_date: Annotated[str | None, typer.Option(help="First day of a range that ends at --date.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Raw files of a day (or of a range) become validated partitions of the feature table."""
    from dl_on_spark.jobs import etl as job

    first = None if start_date is None else _day(start_date, "--start-date")
    _run("etl", job.run, config, date, overrides, as_json, quiet, start_date=first)


@app.command()
def train(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    run_name: Annotated[str | None, typer.Option(help="Folder of the run; default: date and strategy.")] = None,
    resume: Annotated[str, typer.Option(help="auto, never or must.")] = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train on the days up to --date, without the held-out last ones."""
    from dl_on_spark.jobs import train as job

    _run("train", job.run, config, date, overrides, as_json, quiet, run_name=run_name, resume=resume)


@app.command()
def evaluate(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    run_name: Annotated[str | None, typer.Option(help="Folder of the run; default: date and strategy.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Metrics of the trained model on the held-out days."""
    from dl_on_spark.jobs import evaluate as job

    _run("evaluate", job.run, config, date, overrides, as_json, quiet, run_name=run_name)


@app.command()
def publish(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    run_name: Annotated[str | None, typer.Option(help="Folder of the run; default: date and strategy.")] = None,
    force_reason: Annotated[
        str | None, typer.Option("--force", help="Publish although the gate refuses; the reason is recorded.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Pass the gate and make the model the current version; exit code 3 where the gate refuses."""
    from dl_on_spark.jobs import publish as job

    _run(
        "publish",
        job.run,
        config,
        date,
        overrides,
        as_json,
        quiet,
        run_name=run_name,
        force_reason=force_reason,
    )


Reason = Annotated[str | None, typer.Option(help="Why; kept in the pointer's history.")]


@app.command()
def rollback(
    config: Config,
    overrides: Overrides = None,
    version: Annotated[int | None, typer.Option(help="Version to go back to; default: the one before.")] = None,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Make an earlier version the current one again; the one that is left is withdrawn."""
    from dl_on_spark.jobs import models as job

    _show("rollback", job.moved(load_config(config, overrides or ()), version, reason), as_json)


@models.command("rollback")
def rollback_model(
    config: Config,
    version: Annotated[int | None, typer.Argument(help="Default: the one before.")] = None,
    overrides: Overrides = None,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """The same as `dl-on-spark rollback`."""
    rollback(config, overrides, version, reason, as_json)


@models.command("promote")
def promote_model(
    config: Config,
    version: Annotated[int, typer.Argument()],
    overrides: Overrides = None,
    reason: Reason = None,
    as_json: AsJson = False,
) -> None:
    """Make a published version the current one, a newer or a withdrawn one too; the gate is not asked again."""
    from dl_on_spark.jobs import models as job

    _show("promote", job.moved(load_config(config, overrides or ()), version, reason), as_json)


@models.command("list")
def list_models(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """The published versions, newest first, with their stage."""
    from dl_on_spark.jobs import models as job

    rows = job.listed(load_config(config, overrides or ()))
    if as_json:
        _show("models", {"versions": rows}, True)
    else:
        job.show_list(rows, Console())


@models.command("show")
def show_model(
    config: Config,
    version: Annotated[int | None, typer.Argument(help="Default: the current one.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """What a version was made from, how it was judged, and when it was current."""
    from dl_on_spark.jobs import models as job

    found = job.shown(load_config(config, overrides or ()), version)
    if as_json:
        _show("model", found, True)
    else:
        Console().print_json(json.dumps(found, default=str))


@models.command("diff")
def diff_models(
    config: Config,
    first: Annotated[int, typer.Argument()],
    second: Annotated[int, typer.Argument()],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """In which entries of lineage, configuration and metrics two versions differ."""
    from dl_on_spark.jobs import models as job

    found = job.difference(load_config(config, overrides or ()), first, second)
    if as_json:
        _show("diff", found, True)
    else:
        job.show_difference(found, first, second, Console())


@app.command()
def score(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Score the rows of --date with the current model."""
    from dl_on_spark.jobs import score as job

    _run("score", job.run, config, date, overrides, as_json, quiet)


@app.command()
def report(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    run_names: Annotated[
        list[str] | None, typer.Option("--run-name", help="A run; default: all of the date. May be repeated.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="The page; default: reports/NAME/DATE.html on the lake.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the page on a date's runs: learning curves, calibration, throughput, how to repeat them."""
    from dl_on_spark.jobs import report as job

    day = _day(date, "--date")
    found = job.run(load_config(config, overrides or ()), day, run_names=run_names or (), output=output)
    _show("report", found, as_json)


@app.command()
def plan(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers to compare.")] = "1,2,4,8,16,32,64,128,256,512,1024",
    batch: Annotated[str | None, typer.Option(help="Global batches to compare; default: the pipeline's.")] = None,
    network: Annotated[Path | None, typer.Option(help="Links of the cluster, as written by bench network.")] = None,
    workers_per_host: Annotated[int | None, typer.Option(min=1, help="Default: as measured.")] = None,
    price: Annotated[float, typer.Option(min=0, help="Of one worker's hour.")] = 0.0,
    failures: Annotated[float, typer.Option(min=0, help="Of one worker in an hour.")] = 0.0,
    noise_scale: Annotated[float | None, typer.Option(min=1, help="Simple gradient noise scale, in rows.")] = None,
    output: Annotated[Path | None, typer.Option(help="Draw the plan: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure a step on real workers, and say how many workers are worth it, synchronized how."""
    from dl_on_spark.jobs import plan as job

    _run(
        "plan",
        job.run,
        config,
        date,
        overrides,
        as_json,
        quiet,
        workers=_numbers(workers, "--workers"),
        batch=[] if batch is None else _numbers(batch, "--batch"),
        network=network,
        workers_per_host=workers_per_host,
        price_per_hour=price,
        failures_per_hour=failures,
        noise_scale=noise_scale,
        output=output,
    )


@bench.command("network")
def bench_network(
    workers: Annotated[int, typer.Option(min=2, help="Tasks of the barrier stage.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Profile for plan --network.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Time against size: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the exchange between tasks of this cluster, and fit latency and bandwidth."""
    from dl_on_spark.jobs import bench_network as job

    _prepare_logging(as_json)
    found = job.run(workers, output=output, plot=plot)
    if as_json:
        _show("network", found, True)
    else:
        job.show(found, Console())


@bench.command("strategies")
def bench_strategies(
    config: Config,
    date: Date,
    overrides: Overrides = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers to compare.")] = "2",
    sync: Annotated[
        list[str] | None, typer.Option("--sync", help="A strategy; default: one of each kind. May be repeated.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for strategies.json, metric.png and speed.png.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train with each strategy on the same rows, and compare metric, speed and bytes with plain Keras."""
    from dl_on_spark.jobs import bench_strategies as job
    from dl_on_spark.jobs.session import spark_session
    from dl_on_spark.sync import parse_sync

    _prepare_logging(quiet or as_json)
    loaded, day, counts = load_config(config, overrides or ()), _day(date, "--date"), _numbers(workers, "--workers")
    chosen = sync or job.STRATEGIES
    for text in chosen:
        parse_sync(text)
    try:
        with spark_session(loaded, "bench strategies") as spark:
            found = job.run(
                spark, loaded, day, workers=counts, strategies=chosen, output=output, quiet=quiet or as_json
            )
    except KeyboardInterrupt as error:
        raise _cancelled() from error
    if as_json:
        _show("strategies", found, True)
    else:
        job.show(found, Console())


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the demo's lake and report go.")] = Path(
        "demo_output"
    ),
    overrides: Overrides = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The whole pipeline on real flights: ETL, two training runs, gate, publish, scores, report.html."""
    from dl_on_spark.jobs import demo as job

    _prepare_logging(quiet)
    try:
        report = job.run(directory, overrides or (), quiet=quiet or as_json)
    except KeyboardInterrupt as error:
        raise _cancelled() from error
    if as_json:
        _show("demo", report, True)


@app.command()
def package(
    output: Annotated[Path, typer.Option(help="The archive.")] = Path("dist/dl_on_spark.zip"),
    include: Annotated[list[Path] | None, typer.Option(help="A folder of your own code. May be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build the archive for spark-submit --py-files: dl_on_spark and your own folders."""
    from dl_on_spark.jobs.package import build_archive

    folders = include or [folder for folder in (Path("examples"),) if folder.is_dir()]
    names = build_archive(output, folders)
    _show("package", {"archive": str(output), "files": len(names), "bytes": output.stat().st_size}, as_json)


@app.command()
def submit(
    job: Annotated[str, typer.Argument(help="etl, train, evaluate, publish, score, report, doctor or plan.")],
    config: Config,
    date: Annotated[str | None, typer.Option("--date", help="The day the job works for, YYYY-MM-DD.")] = None,
    overrides: Overrides = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Options of the job itself, after --.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the spark-submit line, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: the words of the line as JSON.")] = False,
) -> None:
    """Run a job by spark-submit, on the cluster that pipeline.yaml names; exit code and output are the job's."""
    from dl_on_spark.jobs import submit as job_submit

    pipeline = load_config(config, overrides or ())
    day = [] if date is None else ["--date", _day(date, "--date").isoformat()]
    settings = [word for override in overrides or () for word in ("--set", override)]
    given = ["--config", str(config), *day, *settings, *(arguments or ())]
    command = job_submit.spark_submit_command(pipeline, job, given)
    if dry_run:
        sys.stdout.write((json.dumps(command) if as_json else shlex.join(command)) + "\n")
    else:
        job_submit.submit(pipeline, command)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("--config", help="The pipeline.yaml; default: Spark alone.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: the pipeline's, or 2.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Whether this cluster can train: settings, slots, versions, room, ways between hosts, access to the lake."""
    from dl_on_spark.jobs import doctor as job
    from dl_on_spark.jobs.session import spark_session

    _prepare_logging(as_json)
    pipeline = None if config is None else load_config(config, overrides or ())
    with spark_session(pipeline, "doctor") as spark:
        findings = job.run(spark, pipeline, workers)
    if as_json:
        _show("doctor", job.as_dict(findings), True)
    else:
        job.show(findings, Console())
    if not job.is_ready(findings):
        raise typer.Exit(ConfigError.exit_code)


Run = Annotated[str, typer.Argument(help="Folder of the run.")]


@checkpoints.command("list")
def list_checkpoints(run: Run, as_json: AsJson = False) -> None:
    """The checkpoints of a run, furthest first."""
    _show_checkpoints(run, as_json, verify=False)


@checkpoints.command("verify")
def verify_checkpoints(run: Run, as_json: AsJson = False) -> None:
    """Read every file of every checkpoint against its checksum; exit code 2 where one is damaged."""
    _show_checkpoints(run, as_json, verify=True)


@checkpoints.command("prune")
def prune_checkpoints(
    run: Run,
    keep: Annotated[int, typer.Option(help="Whole checkpoints that stay, the furthest ones.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Remove a run's older checkpoints, and what its earlier attempts left half-written."""
    from dl_on_spark.jobs import checkpoints as job

    removed = job.prune(run, keep)
    _show("prune", {"run": run, "removed": removed if as_json else ", ".join(removed) or "nothing"}, as_json)


def _show_checkpoints(run: str, as_json: bool, *, verify: bool) -> None:
    from dl_on_spark.jobs import checkpoints as job

    saved = job.found(run, verify=verify)
    if as_json:
        _show("checkpoints", job.as_dict(run, saved), True)
    else:
        job.show(run, saved, Console(), verified=verify)
    if any(one.problem for one in saved):
        raise typer.Exit(ConfigError.exit_code)


@table.command("inspect")
def inspect_table(
    uri: Annotated[str, typer.Argument(help="A folder, a file or a URI.")],
    format: Annotated[str, typer.Option(help="auto, or a table format by name.")] = "auto",
    version: Annotated[str | None, typer.Option(help="Version or timestamp, for formats that have them.")] = None,
    where: Annotated[str | None, typer.Option(help="A filter, as of Table.where.")] = None,
    schema: Annotated[Path | None, typer.Option(help="Show how this schema feeds the columns.")] = None,
    workers: Annotated[int, typer.Option(help="Split over so many workers.")] = 2,
    batch: Annotated[int, typer.Option(help="Rows of a step over all workers.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Snapshot, sizes, skew, types, what can be fed and what not, and the split over workers."""
    from dl_on_spark.jobs import inspect_table as job
    from dl_on_spark.lake import Schema

    found = job.inspect(
        uri,
        format=format,
        version=version,
        where=where,
        schema=None if schema is None else Schema.load(schema),
        num_workers=workers,
        global_batch_size=batch,
    )
    if as_json:
        _show("table", job.as_dict(found), True)
    else:
        job.show(found, Console())


def _run(
    name: str,
    job: Any,
    config_file: Path,
    date: str,
    overrides: Sequence[str] | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """One job with a Spark session around it."""
    from dl_on_spark.jobs.session import spark_session

    _prepare_logging(quiet)
    config: PipelineConfig = load_config(config_file, overrides or ())
    day = _day(date, "--date")
    spark: SparkSession
    try:
        with spark_session(config, name) as spark:
            report = job(spark, config, day, quiet=quiet or as_json, **options)
    except KeyboardInterrupt as error:
        raise _cancelled() from error
    _show(name, report, as_json)


def _cancelled() -> Cancelled:
    return Cancelled("stopped by the user or the scheduler.", fix="Run the same command again to resume.")


def _day(text: str, option: str) -> datetime.date:
    try:
        # fromisoformat also takes 20130630 and 2013-W26-7, which the scheduler's other tools read otherwise.
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
            raise ValueError("not YYYY-MM-DD")
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not a day.", fix="Write it as YYYY-MM-DD.") from error


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not a list of numbers.", fix="For example 1,2,4,8.") from error
    if min(found) < 1:
        raise ConfigError(f"{option} {text!r}: {min(found)} is below 1.", fix="For example 1,2,4,8.")
    return found


def _prepare_logging(quiet: bool) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.ERROR if quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("py4j", "sqlglot", "matplotlib", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _show(name: str, report: dict[str, Any], as_json: bool) -> None:
    """The result: JSON, or a table of its plain values."""
    if as_json:
        sys.stdout.write(json.dumps(report, default=str) + "\n")
        return
    table = Table(title=name, show_header=False, title_style="bold", title_justify="left")
    for key, value in report.items():
        if isinstance(value, float):
            table.add_row(key, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")
        elif isinstance(value, int) and not isinstance(value, bool):
            table.add_row(key, f"{value:,}")
        elif isinstance(value, (str, bool)):
            table.add_row(key, Text(str(value), overflow="fold"))
    Console().print(table)


def _show_error(error: DLOnSparkError) -> None:
    """First the cause with its traceback, then one panel with the way out."""
    console = Console(stderr=True)
    cause: BaseException | None = error
    while cause is not None:
        traceback = getattr(cause, "traceback", None)
        if traceback:
            console.print(Text(str(traceback).rstrip()))
            break
        cause = cause.__cause__
    body = Text(error.message, overflow="fold")
    if error.fix:
        body.append(f"\n\n{error.fix}", style="bold")
    console.print(Panel(body, title=f"{type(error).__name__} (exit code {error.exit_code})", border_style="red"))


def _show_spark_error(error: Exception) -> None:
    """What Spark says, without Java's stack; a Python traceback of the user's code comes first."""
    from dl_on_spark.launch.barrier import plain_cause

    headline, traceback = plain_cause(error)
    console = Console(stderr=True)
    if traceback:
        console.print(Text(traceback))
    console.print(Panel(Text(headline, overflow="fold"), title="Spark's error (exit code 1)", border_style="red"))


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a pipeline's functions may lie beside it, as with `python -m`
    try:
        app(args=None if argv is None else list(argv))
    except DLOnSparkError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except OSError as error:
        if isinstance(error, ConnectionError | TimeoutError):  # no file that the user could mend
            raise
        said = str(error) if error.filename is None else f"{error.filename}: {error.strerror}."
        _show_error(InputError(said, fix="Mend the path, its permissions, or the room on its disk."))
        sys.exit(InputError.exit_code)
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        from dl_on_spark.launch.barrier import input_error

        bad_input = input_error(error)
        if bad_input is not None:
            _show_error(bad_input)
            sys.exit(bad_input.exit_code)
        _show_spark_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
