"""Training under every codec on two real processes: agreement, resumption, learning; and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dl_on_spark.collectives import Communicator
from dl_on_spark.collectives.codecs import CODECS, PowerSGD
from dl_on_spark.errors import ModelError
from dl_on_spark.sync import Allreduce, parse_sync
from dl_on_spark.sync.compression import BucketCompressors
from tests.collectives.processes import Ranks
from tests.sync import compressed_ranks
from tests.sync.ranks import build

Found = list[dict[str, Any]]
# With so few weights the defaults of sparse codecs send one of them a step.
TEXTS = {name: name for name in CODECS} | {
    "topk": "topk(0.3)",
    "dgc": "dgc(0.3,0.5,none,8)",
    "threshold": "threshold(0.02)",
}
every = pytest.mark.parametrize("name", [*TEXTS.values(), "in a graph"])


@pytest.fixture(scope="module")
def found() -> Found:
    with Ranks(2, compressed_ranks.run, list(TEXTS.values()), deadline_s=60) as two:
        return two.results()


@every
def test_both_ranks_end_with_the_same_weights(found: Found, name: str) -> None:
    for one, other in zip(found[0][name]["whole"], found[1][name]["whole"], strict=True):
        np.testing.assert_array_equal(one, other)


@every
def test_a_resumed_run_ends_with_the_same_bits(found: Found, name: str) -> None:
    for rank in found:
        for one, other in zip(rank[name]["resumed"], rank[name]["whole"], strict=True):
            np.testing.assert_array_equal(one, other)


@every
def test_the_model_learns(found: Found, name: str) -> None:
    loss = found[0][name]["loss"]
    assert loss[-1] < loss[0]
    if name in {"fp16", "bf16", "int8", "in a graph"}:
        np.testing.assert_allclose(loss, found[0]["dense"], rtol=0.01)


def test_alone_nothing_is_compressed_but_momentum_still_acts(found: Found) -> None:
    assert found[0]["alone"] == {"topk": [], "dgc": ["momentum", "rank", "residual", "shared_step"]}


def test_each_bucket_has_a_state_of_its_own(found: Found) -> None:
    names = [name for name in found[0]["in a graph"]["session"] if name.endswith("residual")]
    assert len(names) > 1


def test_steps_that_a_loss_scaler_skips_leave_no_trace_in_the_residuals(found: Found) -> None:
    for rank in found:
        after, loss, scale = rank["loss scale"]
        assert all(np.isfinite(array).all() for array in after)
        assert scale < 2.0**126
        assert loss[-1] < loss[0]
        assert max(np.abs(a - b).max() for a, b in zip(after, build().get_weights(), strict=True)) > 1e-3


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_named_in_one_word_of_the_configuration(name: str) -> None:
    strategy = parse_sync(f"allreduce:compress={name}")
    assert strategy == Allreduce(compress=CODECS[name]()) == Allreduce(compress=name)
    assert parse_sync(str(strategy)) == strategy


def test_a_rank_that_resumes_from_anothers_state_keeps_what_is_shared_only() -> None:
    shapes, dtype = [(20, 20), (3,)], np.dtype(np.float32)
    comm = Communicator.connect(0, 1, "")
    saved = BucketCompressors(PowerSGD(2), comm, 1)
    gradient = np.random.default_rng(0).standard_normal(403).astype(np.float32)
    saved.at(0, 0, shapes, dtype).reduce(gradient, comm)
    for rank in (0, 1):
        resumed = BucketCompressors(PowerSGD(2), comm, 1)
        resumed.load_state({**saved.state(), "rank": np.array(rank)})
        state = resumed.at(0, 0, shapes, dtype).state()
        kept = saved.at(0, 0, shapes, dtype).state()
        np.testing.assert_array_equal(state["shared_factor"], kept["shared_factor"])
        np.testing.assert_array_equal(state["residual"], kept["residual"] if rank == 0 else np.zeros(403))


def test_a_step_that_reduces_other_gradients_than_before_is_refused() -> None:
    compressors = BucketCompressors(PowerSGD(2), Communicator.connect(0, 1, ""), 1)
    compressors.at(0, 0, [(3,)], np.dtype(np.float32))
    with pytest.raises(ModelError, match="other gradients than before"):
        compressors.at(0, 0, [(4,)], np.dtype(np.float32))
