"""The pages in docs/ tell what works: their Python runs, and so do their commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from dl_on_spark import Schema, open_table
from dl_on_spark.cli import app
from dl_on_spark.registry import Registry

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_page_on_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in ("2024-01-01", "2024-01-02"):
        folder = tmp_path / "lake" / "flights" / f"date={day}"
        folder.mkdir(parents=True)
        columns = {"flight": [1, 2, 3], "delay": [0.5, 1.5, 2.5], "origin": ["JFK", "EWR", "JFK"]}
        pq.write_table(pa.table({**columns, "place": [{"x": float(i)} for i in range(3)]}), folder / "a.parquet")
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "tables.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "tables.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("parquet 2 1 ") and "'place.x': (2,)" in said and "300 rows, one file a batch" in said
    assert open_table("lake/digits").snapshot().format == "petastorm"
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert Schema.from_yaml(f"name: t\n{yaml}")["points"].tensor_spec() == ((500, 3), "float32")
    (command,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    shown = CliRunner().invoke(app, shlex.split(command)[1:])
    assert shown.exit_code == 0 and "Split over 4 workers" in shown.output


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_page_on_pyspark_ml(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flights = spark.range(200).selectExpr(
        "cast(id % 50 as double) distance",
        "cast(id % 24 as int) hour",
        "if(id % 3 = 0, 'AA', 'UA') carrier",
        "cast(id % 24 > 12 as int) delayed",
    )
    text = (DOCS / "spark_ml.md").read_text(encoding="utf-8")
    # Spark's own program started elsewhere: its relative paths are not those of this test.
    text = text.replace('"flight_model"', f'"{tmp_path}/flight_model"')
    names: dict[str, object] = {"flights": flights, "__name__": "spark_ml_page"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "spark_ml.md", "exec"), names)
    said = capsys.readouterr().out
    assert "['probability', 'prediction']" in said and "'accuracy'" in said
    assert list(Path("store").iterdir()) == [] and Path("flight_model", "stages").is_dir()


def test_the_page_on_planning(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "planning.md", "exec"), {})
    assert re.match(r"Take .* on \d+ workers: [\d,]+ rows/s", capsys.readouterr().out)


def test_the_page_on_synchronization() -> None:
    from dl_on_spark import Schema
    from dl_on_spark.input_pipeline import SamplePlan
    from dl_on_spark.training.model_loading import build

    text = (DOCS / "synchronization.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(block, "synchronization.md", "exec"), names)
    fields = {name: {"type": "float", "role": role} for name, role in (("x", "feature"), ("y", "label"))}
    plan = SamplePlan.create([4096], num_workers=2, global_batch_size=1024, seed=1)
    rate = build(
        names["build_model"], Schema.from_dict({"name": "page", "fields": fields}), plan
    ).optimizer._learning_rate
    assert [round(float(rate(step)), 6) for step in (0, 10, 20, 99)] == [0.05, 0.125, 0.2, 0.2]


def test_the_page_on_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "schemas"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    monkeypatch.chdir(tmp_path)
    registry = Registry("demo_output/lake/models", "flight_delay")
    for model, auc in (("a", 0.75), ("b", 0.76)):
        metrics = json.dumps({"auc": auc, "rows": 100}).encode()
        lineage = {"model_sha256": model, "date": "2013-06-30", "config": {"training": {"seed": ord(model)}}}
        registry.publish({"model.keras": b"", "metrics.json": metrics}, lineage)
    text = (DOCS / "publishing.md").read_text(encoding="utf-8")
    said = []
    for line in "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines():
        shown = CliRunner().invoke(app, shlex.split(line)[1:])
        assert shown.exit_code == 0, f"{line}\n{shown.output}"
        said.append(shown.output)
    listed, one, different, *_ = said
    assert "current" in listed and "previous" in listed and "0.7600" in listed
    assert '"model_sha256": "b"' in one and "lineage.config.training.seed" in different
    assert [(e["version"], e["what"]) for e in registry.stages().history][2:] == [
        (1, "rollback"),
        (2, "promote"),
        (1, "rollback"),
    ]
    told = CliRunner().invoke(
        app, ["models", "list", "--config", "examples/flight_delay/pipeline.yaml", "--json"], catch_exceptions=False
    )
    assert [(row["version"], row["stage"]) for row in json.loads(told.output)["versions"]] == [
        (2, "withdrawn"),
        (1, "current"),
    ]
