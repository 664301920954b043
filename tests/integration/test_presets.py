"""Every choice of `algorithm` trains the embedded task: real completions, their rewards, and steps of the engine."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_core.api.scored_groups import ScoredGroup
from areal_core.config.schema import load
from areal_core.storage import weights
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.engines.torch_engine import TorchEngine
from benchmarks import staleness
from benchmarks.staleness import Job, LaggedTraining
from flows.compose import CONF, compose
from tests.support.models import write_tiny
from tests.support.training import numbers

PRESETS = sorted(file.stem for file in (CONF / "algorithm").glob("*.yaml"))
STEPS, LAG = 4, 2


def every_second_rewarded(scored: list[ScoredGroup]) -> list[ScoredGroup]:
    """A random model's completions are hardly ever correct: every second one is rewarded."""
    return [
        dataclasses.replace(
            group,
            summary=dataclasses.replace(
                group.summary, rewards=tuple(float(index % 2) for index in range(len(group.summary.rewards)))
            ),
        )
        for group in scored
    ]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.nightly
def test_a_preset_trains(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[TrainingBatch] = []
    proximals: list[bool] = []
    losses: list[float] = []

    class Recording(TorchEngine):
        def train_step(self, batch, proximal):
            batches.append(batch)
            proximals.append(proximal is not None)
            stats = super().train_step(batch, proximal)
            losses.append(stats.loss)
            assert stats.updates == 2
            assert stats.trained_tokens > 0
            assert all(np.isfinite(value) for value in numbers(stats).values() if value is not None)
            return stats

    torch.set_num_threads(1)
    monkeypatch.setattr(staleness, "TorchEngine", Recording)
    composed = compose(
        "cpu-async",
        [
            f"algorithm={preset}",
            "algorithm.group_size=4",
            "rollout.batch_size=16",
            "task.max_new_tokens=24",
            "training.minibatches=2",
            f"training.steps={STEPS}",
            "training.learning_rate=1e-2",
        ],
    )
    config = load(composed.to_dict())  # as a run's processes read it back
    model = write_tiny(tmp_path / "model")
    training = LaggedTraining(Job(lag=LAG, config=config, model_path=str(model)), tmp_path / "store")
    roll_out = training._roll_out
    monkeypatch.setattr(training, "_roll_out", lambda step: every_second_rewarded(roll_out(step)))
    for _ in range(STEPS):
        training.step()
    assert proximals == [config.recomputes_proximal] * STEPS
    assert max(batch.step - 1 - batch.versions[batch.loss_mask].min() for batch in batches) == LAG
    assert len({round(loss, 9) for loss in losses}) == STEPS
    versions = [weights.load(version) for version in training.versions[1:]]
    for one, other in pairwise(versions):
        assert any((one[name] != other[name]).any() for name in one)
