"""The arms that are compared do the same work, cuts are what they are said to be, and what is made of the numbers."""

from __future__ import annotations

import pytest
import torch

from benchmarks import _training_offline as offline
from benchmarks._training_offline import SETTINGS, make_batch, same_update
from benchmarks.training import fastest, figures

torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "BATCH_TOKENS", 600)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SETTINGS)
def test_padded_training_has_the_loss_and_the_gradient_of_the_engine(name: str) -> None:
    same_update(offline.arms(SETTINGS[name]), make_batch(SETTINGS[name], 0))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", offline.SHARING)
def test_sharing_prompts_has_the_loss_and_the_gradient_of_packs_of_whole_sequences(name: str) -> None:
    same_update(offline.sharing_arms(offline.SHARING[name]), make_batch(offline.SHARING[name], 0))


def test_ratios_are_within_rounds_and_baselines_are_the_best_and_the_most_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [
        {"packed": 12.0, "padded": 4.0, "sorted_512": 10.0, "sorted_1024": 6.0},
        {"packed": 30.0, "padded": 6.0, "sorted_512": 20.0, "sorted_1024": 50.0},
        {"packed": 12.0, "padded": 3.0, "sorted_512": 10.0, "sorted_1024": 6.0},
    ]
    assert fastest(rounds, "sorted_") == "sorted_512"  # by medians: 10 and 6
    cuts = [{"dynamic_512": 3.0, "fixed_512": 2.0, "dynamic_1024": 3.0, "fixed_1024": 2.5}]
    peaks = {"dynamic_512": 40.0, "fixed_512": 20.0, "dynamic_1024": 90.0, "fixed_1024": 50.0}
    monkeypatch.setattr(offline, "CAPACITIES", (512, 1024))
    result = figures({"long_tail": rounds, "default": rounds}, cuts, peaks, {1: 0.04, 2: 0.02, 3: 0.03})
    assert (result["packed_over_padded"], result["packed_over_sorted"]) == (4.0, 1.2)
    assert (result["dynamic_over_fixed"], result["overhead_share"]) == (1.5, 0.03)
    assert result["dynamic_over_fixed_by_capacity"] == {512: 1.5, 1024: 1.2}
    assert result["dynamic_512_over_fixed_1024"] == 1.2  # peaks of 40 and 50
    assert result["ratios"]["long_tail"]["sorted"] == [1.2, 1.5, 1.2]
    assert result["tokens_per_cpu_s"]["default"]["padded"] == 4
