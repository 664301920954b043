"""The lag of every step is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.config.schema import load
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.engines.torch_engine import TorchEngine
from benchmarks import staleness
from benchmarks.staleness import Job, LaggedTraining
from tests.support.models import write_tiny

TINY = {
    "tracking": {"enabled": False},
    "task": {"held_out": 8, "max_new_tokens": 8},
    "algorithm": {"group_size": 2},
    "rollout": {"batch_size": 4},
    "training": {"steps": 5, "minibatches": 1},
}


def test_tokens_are_those_of_the_lagged_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lag, batches = 2, list[TrainingBatch]()

    class Recording(TorchEngine):
        def train_step(self, batch, proximal):
            batches.append(batch)
            return super().train_step(batch, proximal)

    monkeypatch.setattr(staleness, "TorchEngine", Recording)
    job = Job(lag=lag, config=load(TINY), model_path=str(write_tiny(tmp_path / "model")))
    training = LaggedTraining(job, tmp_path / "store")
    assert [training.step().step for _ in range(5)] == [1, 2, 3, 4, 5]
    for batch in batches:
        assert set(batch.versions[batch.loss_mask].tolist()) == {max(0, batch.step - 1 - lag)}
