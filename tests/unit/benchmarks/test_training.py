"""The arms that are compared do the same work, and the rivals' as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import _training_offline as offline
from benchmarks._training_offline import SETTINGS, make_batch, same_update
from benchmarks.trl import CASES, Case, grpo_arguments, own_versions
from flows.compose import compose

torch.set_num_threads(1)


def test_arms_of_training_have_one_loss_and_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "BATCH_TOKENS", 600)
    name, sharing = next(iter(SETTINGS)), next(iter(offline.SHARING))
    same_update(offline.arms(SETTINGS[name]), make_batch(SETTINGS[name], 0))
    same_update(offline.sharing_arms(offline.SHARING[sharing]), make_batch(offline.SHARING[sharing], 0))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_trl_makes_as_many_updates_of_as_many_completions(case: Case) -> None:
    config = compose(case.experiment, [f"training.steps={case.steps}"])
    told = grpo_arguments(config, 2, Path("output"))
    a_minibatch = told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] * 2
    assert a_minibatch * config.training.minibatches == config.rollout.batch_size
    assert a_minibatch % told["num_generations"] == 0
    assert told["max_steps"] == case.steps * config.training.minibatches


def test_the_comparison_says_which_versions_it_compared():
    assert own_versions().keys() == {"areal", "torch"}
