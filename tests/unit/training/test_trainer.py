"""What the trainer does beside its steps, with a batch whose numbers are not finite, and with a checkpoint that is
damaged for others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_core.errors import DivergenceError
from areal_core.run.prepare import prepare
from areal_core.storage import checkpoint
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.metrics import StepTimes
from areal_core.training.trainer import Trainer
from tests.support.runs import tiny
from tests.support.training import batch

PATIENCE_S = 20.0


def trainer(root: Path, on_divergence: str = "stop") -> Trainer:
    return Trainer(prepare(tiny(root, training={"on_divergence": on_divergence}), run_id="r"), 0)


def times() -> StepTimes:
    return StepTimes(waiting_since=0.0, start=0.0)


def sound(step: int) -> TrainingBatch:
    """Its updates are finite."""
    share = broken(step)
    return replace(share, behaviour_logprobs=np.where(share.loss_mask, -1, 0).astype(np.float32))


def broken(step: int) -> TrainingBatch:
    """No update of it is finite."""
    share = batch(step)
    share = replace(share, tokens=share.tokens % 10, advantages=np.where(share.loss_mask, np.float32(1), np.float32(0)))
    return replace(share, behaviour_logprobs=np.where(share.loss_mask, np.float32(np.nan), np.float32(0)))


def test_a_batch_that_diverges_is_saved_and_ends_the_run(tmp_path: Path) -> None:
    share = broken(7)
    with pytest.raises(DivergenceError, match=r"step 7, update 0: .*must be finite; its batch: ") as caught:
        trainer(tmp_path)._learn(share, times())
    path = Path(re.findall(r"its batch: (\S+)$", str(caught.value))[0])
    assert path == tmp_path / "runs/r/diverged/step-000007-rank-0.safetensors"
    arrays = load_file(path)
    for name in ("tokens", "lengths", "prompt_lengths", "loss_mask", "behaviour_logprobs", "versions", "advantages"):
        np.testing.assert_array_equal(arrays[name], getattr(share, name))
    for index, members in enumerate(share.minibatches):
        assert (arrays["minibatch"][list(members)] == index).all()
    later = np.repeat(arrays["minibatch"] > 0, share.lengths)  # the first minibatch's own pass is its pi_prox
    assert (arrays["proximal_logprobs"][share.loss_mask & later] < 0).all()
    assert not arrays["proximal_logprobs"][~later].any()


def test_skipping_goes_on_with_the_batch_saved_but_not_for_ever(tmp_path: Path) -> None:
    one = trainer(tmp_path, "skip")
    for step in (1, 2):
        stats = one._learn(broken(step), times())
        assert (stats.updates, stats.skipped) == (0, 2)
    stats = one._learn(sound(3), times())
    assert (stats.updates, stats.skipped) == (2, 0)
    for step in (4, 5):
        one._learn(broken(step), times())
    with pytest.raises(DivergenceError, match="step 6: no update was finite in 3 steps in a row"):
        one._learn(broken(6), times())
    saved = sorted(path.name for path in (tmp_path / "runs/r/diverged").iterdir())
    assert saved == [f"step-{step:06d}-rank-0.safetensors" for step in (1, 2, 4, 5, 6)]


@pytest.mark.parametrize(
    ("rank", "others", "newest"),
    [
        pytest.param(0, ([0, 0], [1], [0, 0], [0]), 1, id="rank 0 sets it aside"),
        pytest.param(1, ([2, 0], [1], [1, 0], [0]), 2, id="another one leaves that to it"),
    ],
)
def test_resume_skips_a_checkpoint_that_another_rank_finds_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, others: tuple[list[int], ...], newest: int
) -> None:
    """`others`: what is the largest of the other ranks, at each of the collectives."""
    one = trainer(tmp_path)
    state = one.engine.state()
    assert one.publisher is not None
    for step in (1, 2):
        checkpoint.save(one.storage, step, one.publisher._written(state), {"engine": state.scalars})
    one.rank, one.publisher = rank, None
    said = iter(others)
    monkeypatch.setattr(one.ranks, "all_reduce_max", lambda values: np.maximum(values, next(said)))
    monkeypatch.setattr(one.controller, "status", lambda: SimpleNamespace(step=2))
    assert one._resume() == 1
    assert next(said, None) is None
    left = checkpoint.newest(one.storage)
    assert left is not None
    assert left.step == newest
