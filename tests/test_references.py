"""Functions that configuration names: what is wrong with the name or its module is said, with the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from dl_on_spark.errors import ConfigError
from dl_on_spark.references import load_function


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("model_a", "names no function"),
        ("model_nowhere:build", "there is no module 'model_nowhere'"),
        ("model_a:biuld", "has no function 'biuld'"),
        ("model_broken:build", r"model_broken\.py, line 2: '\(' was never closed"),
        ("model_needs:build", "cannot be imported: No module named 'not_installed_here'"),
    ],
)
def test_a_reference_that_leads_nowhere_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, said: str
) -> None:
    (tmp_path / "model_a.py").write_text("def build(): ...\n")
    (tmp_path / "model_broken.py").write_text("\nbuild = (\n")
    (tmp_path / "model_needs.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        load_function(reference)
    assert caught.value.fix


def test_an_error_of_the_modules_own_code_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_raises.py").write_text("raise ZeroDivisionError('mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError, match="mine"):
        load_function("model_raises:build")
