"""The page a person looks at."""

from __future__ import annotations

from dl_on_spark.report.page import Page, RunOnPage, Verdict, render

__all__ = ["Page", "RunOnPage", "Verdict", "render"]
