"""The page: one file, nothing fetched, nothing lost, for classifiers and regressors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dl_on_spark.registry import metrics_of
from dl_on_spark.report import Page, RunOnPage, render


def _page(tmp_path: Path, runs: tuple[RunOnPage, ...]) -> str:
    page = Page("clicks <b>", "6 rows", runs, {"Data": [("table", "/a b/<c>")]}, ("spark-submit x",))
    render(page, str(tmp_path / "report.html"))
    return (tmp_path / "report.html").read_text()


def _classifier(name: str, scores: list[float]) -> RunOnPage:
    metrics = metrics_of(np.array([0.0, 1.0, 0.0, 1.0]), np.array(scores), 0.4)
    return RunOnPage(name, 10.0, metrics, {"loss": [0.5, 0.4], "val_loss": [0.6, 0.5], "auc": [0.5, 0.6]})


def test_nothing_is_fetched_and_text_is_escaped(tmp_path: Path) -> None:
    html = _page(tmp_path, (_classifier("a", [0.1, 0.2, 0.6, 0.9]),))
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", html)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"""\w+://[^\s"'<>]+""", html)) <= namespaces
    assert "clicks &lt;b&gt;" in html and "/a b/&lt;c&gt;" in html
    assert "prefers-color-scheme: dark" in html


def test_every_run_is_drawn_also_beyond_the_colours(tmp_path: Path) -> None:
    runs = tuple(_classifier(f"run-{i}", [0.1, 0.2, 0.6, 0.9 - i / 100]) for i in range(6))
    html = _page(tmp_path, runs)
    for run in runs:
        assert html.count(run.name) >= 4, run.name  # table, curves, calibration, throughput


def test_a_regressor_has_errors_instead_of_classes(tmp_path: Path) -> None:
    metrics = metrics_of(np.array([1.5, 2.5]), np.array([1.0, 3.0]), 2.0)
    html = _page(tmp_path, (RunOnPage("r", 10.0, metrics, {"loss": [0.5, 0.4]}),))
    assert "mean squared error" in html and "0.2500" in html
    assert "AUC" not in html and "Calibration" not in html


def test_rows_of_one_class_have_no_auc_on_the_page(tmp_path: Path) -> None:
    metrics = metrics_of(np.array([0.0, 0.0]), np.array([0.1, 0.3]), 0.2)
    html = _page(tmp_path, (RunOnPage("r", 10.0, metrics),))
    assert "\N{EN DASH}" in html and "0.5000" not in html
