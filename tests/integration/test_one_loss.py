"""One loss, one gradient and the same weights, whichever engine trains, however ranks partition the model and however a
batch is cut."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from areal_core.training.distributed.ranks import RankGroup
from tests.support import forked
from tests.support.engines import CASES, run, trained
from tests.support.training import numbers

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end, pytest.mark.cpu_seconds(60)]

PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcomes of two ranks, on a machine without a compiler."""
    folder = tmp_path_factory.mktemp("engines")
    environment = {"PATH": "", "HOME": str(folder / "home"), "TORCH_EXTENSIONS_DIR": str(folder / "home")}
    started = [forked.start(run, rank, 2, folder, output=folder / "log", environment=environment) for rank in range(2)]
    for process in started:
        process.join(PATIENCE_S)
        process.kill()
    assert [process.exitcode for process in started] == [0, 0], (folder / "log").read_text()
    assert not (folder / "home").exists(), "something was compiled or cached"
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_every_engine_takes_the_same_steps(ranks: list[Any], case: str) -> None:
    """As one rank of the torch engine does, with all sequences of a minibatch at once."""
    settings = {name: CASES[case][name] for name in ("spec", "lora", "minibatches") if name in CASES[case]}
    expected, exact = trained(RankGroup(), **settings)
    stats, weights = ranks[0][0][case]
    assert ranks[1][0][case][0] == stats
    half = "bfloat16" in case
    assert expected[0].grad_norm > 0.1
    assert stats[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=2**-6 if half else 1e-4)
    for number, (one, other) in enumerate(zip(stats, expected, strict=True)):
        if not half:
            assert numbers(one) == pytest.approx(numbers(other), rel=1e-3 if number else 1e-4, abs=1e-5)
    assert weights.keys() == exact.keys()
    for name, values in exact.items():
        tolerance = 0.05 if half else 1e-3 if "adapter" in case else 1e-4
        assert np.linalg.norm(weights[name] - values) <= tolerance * np.linalg.norm(values), name
        assert (weights[name].view(np.uint32) & 0xFFFF).any(), name  # in float32, so that small updates are kept


def test_divergence_raises_on_every_rank_and_changes_nothing(ranks: list[Any]) -> None:
    for _, errors in ranks:
        for error, changed in errors.values():
            assert error.startswith("step 9, update 0: loss")
            assert not changed
