"""The lag of every step is exact, in the weights and not in the label alone; what is made of the outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.config.schema import load
from areal_core.models.folders import init_weights, read_weights, write_model
from areal_core.models.spec import read_spec
from areal_core.storage import weights
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.engines.torch_engine import TorchEngine
from benchmarks import staleness
from benchmarks.staleness import Job, LaggedTraining
from tests.support.models import SPEC, write_tiny

TINY = {
    "tracking": {"enabled": False},
    "task": {"held_out": 8, "max_new_tokens": 8},
    "algorithm": {"group_size": 2},
    "rollout": {"batch_size": 4},
    # No completion of a random model is correct: weight decay alone moves the weights, and moves them far.
    "training": {"steps": 5, "minibatches": 1, "learning_rate": 0.5, "weight_decay": 0.5},
    "evaluation": {"every": 2},
}


def job(folder: Path, lag: int, objective: str = "decoupled") -> Job:
    values = TINY | {"algorithm": TINY["algorithm"] | {"objective": objective}}
    return Job(lag=lag, config=load(values), model_path=str(opinionated(folder / "model")))


def opinionated(folder: Path) -> Path:
    """A tiny model whose probabilities differ enough to tell its versions apart."""
    write_tiny(folder)
    tensors = {name: 20 * tensor for name, tensor in init_weights(SPEC, seed=0).items()}
    write_model(folder, SPEC, tensors, folder / "tokenizer.json")
    return folder


def test_tokens_are_sampled_by_the_weights_of_the_lagged_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = 2
    batches: list[TrainingBatch] = []

    class Recording(TorchEngine):
        def train_step(self, batch, proximal):
            batches.append(batch)
            return super().train_step(batch, proximal)

    monkeypatch.setattr(staleness, "TorchEngine", Recording)
    work = job(tmp_path, lag)
    training = LaggedTraining(work, tmp_path / "store")
    steps = [training.step().step for _ in range(5)]
    assert steps == [1, 2, 3, 4, 5]

    spec = read_spec(work.model_path)
    base = read_weights(work.model_path, spec)
    engine = TorchEngine(spec, base, work.config.training, work.config.algorithm)
    stored = [{name: tensor.numpy() for name, tensor in base.items()}]
    stored += [weights.load(version) for version in training.versions[1:]]
    for batch in batches:
        behaviour = max(0, batch.step - 1 - lag)
        assert set(batch.versions[batch.loss_mask].tolist()) == {behaviour}
        difference, tokens = engine.train_inference_kl(batch, stored[behaviour], behaviour)
        assert tokens == batch.loss_mask.sum()
        assert difference / tokens < 1e-9
        other = stored[batch.step]  # a version that was not there yet
        assert engine.train_inference_kl(batch, other, behaviour)[0] / tokens > 1e-4
