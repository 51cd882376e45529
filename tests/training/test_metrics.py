"""Metrics of two real ranks are those of one process that saw every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.collectives.processes import Ranks
from tests.training import two_ranks
from tests.training.worlds import columns

NAMES = {"loss", "accuracy", "auc", "rmse", "peak"}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    with Ranks(2, two_ranks.metrics, deadline_s=60) as two:
        return two.results()


@pytest.mark.parametrize("name", sorted(NAMES | {f"val_{name}" for name in NAMES}))
def test_a_metric_over_two_ranks_is_that_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    alone, both = found[0]["one"], found[0]["two"]
    assert both.keys() == alone.keys() == NAMES | {f"val_{n}" for n in NAMES}
    np.testing.assert_allclose(both[name], alone[name], rtol=1e-6)
    assert found[1]["two"][name] == both[name]


def test_metrics_saved_in_mid_epoch_go_on_to_the_values_of_all_rows(found: list[dict[str, Any]]) -> None:
    table = columns()
    model = two_ranks.measured(0.0)
    x = {"x": table["x"], "category": table["category"]}
    model.test_on_batch(x, table["y"])
    expected = {name: float(value) for name, value in model.get_metrics_result().items()}
    for rank in found:
        assert rank["untouched"]
        assert rank["undone"]
        assert rank["resumed"].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(rank["resumed"][name], value, rtol=1e-6, err_msg=name)


def test_metrics_that_do_not_exist_yet_are_not_restored_and_a_warning_says_so(caplog: Any) -> None:
    from dl_on_spark.training.metrics import load_metric_state

    model = two_ranks.measured(0.0)  # its metrics are made by the first batch
    state = {f"{i:04d}/some/path": np.ones((), np.float32) for i in range(9)}
    load_metric_state(model, state, rank=0)
    assert "cover only the steps from here on" in caplog.text
    assert float(model.metrics[0].result()) == 0.0
