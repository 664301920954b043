"""Every choice of `algorithm` trains the embedded task: real completions, their rewards, and steps of the engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.api.scored_groups import ScoredGroup
from areal_core.config.schema import load
from areal_core.storage import weights
from areal_core.training.engines.engine import StepStats, TrainingBatch
from areal_core.training.engines.torch_engine import TorchEngine
from benchmarks import staleness
from benchmarks.staleness import Job, LaggedTraining
from flows.compose import CONF, compose
from tests.support.models import write_tiny
from tests.support.training import numbers

PRESETS = sorted(file.stem for file in (CONF / "algorithm").glob("*.yaml"))
STEPS, LAG = 4, 2


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.nightly
def test_preset_trains(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []

    class Recording(TorchEngine):
        def train_step(self, batch: TrainingBatch, proximal: Any) -> StepStats:
            assert (proximal is not None) == config.recomputes_proximal
            stats = super().train_step(batch, proximal)
            losses.append(stats.loss)
            assert (stats.updates, stats.trained_tokens > 0) == (2, True)
            assert all(np.isfinite(value) for value in numbers(stats).values() if value is not None)
            return stats

    torch.set_num_threads(1)
    monkeypatch.setattr(staleness, "TorchEngine", Recording)
    small = ["algorithm.group_size=4", "rollout.batch_size=16", "task.max_new_tokens=24", "training.minibatches=2"]
    settings = [f"algorithm={preset}", *small, f"training.steps={STEPS}", "training.learning_rate=1e-2"]
    config = load(compose("cpu-async", settings).to_dict())  # as a run's processes read it back
    model = write_tiny(tmp_path / "model")
    training = LaggedTraining(Job(lag=LAG, config=config, model_path=str(model)), tmp_path / "store")
    roll_out = training._roll_out

    def every_second_rewarded(step: int) -> list[ScoredGroup]:
        """A random model's completions are hardly ever correct."""
        rewards = (0.0, 1.0, 0.0, 1.0)
        return [replace(group, summary=replace(group.summary, rewards=rewards)) for group in roll_out(step)]

    monkeypatch.setattr(training, "_roll_out", every_second_rewarded)
    for _ in range(STEPS):
        training.step()
    assert len({round(loss, 9) for loss in losses}) == STEPS
    versions = [weights.load(version) for version in training.versions[1:]]
    for one, other in pairwise(versions):
        assert any((one[name] != other[name]).any() for name in one)
