"""The arms that are compared do the same work, cuts are what they are said to be, and what is made of the numbers."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from areal_core.training.engines.engine import TrainingBatch
from benchmarks import _training_offline as offline
from benchmarks._padded_training import pad, sorted_cut
from benchmarks._training_offline import LONGEST, SETTINGS, FixedBatch, make_batch, recut, same_update
from benchmarks.training import fastest, figures, overhead_share, sharing_figures

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


def test_what_sharing_allows_is_what_it_leaves_to_compute() -> None:
    """8 trajectories of 250 tokens, of which 200 + 8 x 50 are left."""
    assert offline.saved("prompt200") == pytest.approx(2000 / 600)
    assert 1.2 < offline.saved("default") < 1.5


def test_the_worth_of_sharing_is_that_of_the_fastest_sizes() -> None:
    rounds = [
        {"packed": 10.0, "packed_2048": 12.0, "shared": 30.0, "shared_2048": 20.0},
        {"packed": 10.0, "packed_2048": 15.0, "shared": 30.0, "shared_2048": 50.0},
    ]
    made = sharing_figures({"default": rounds}, {"default": 3.25})
    assert made["shared_over_packed"] == {"default": round((20 / 12 + 50 / 15) / 2, 3)}
    assert made["shared_allows"] == {"default": 3.25}


@pytest.mark.usefixtures("small")
def test_an_arm_that_leaves_something_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(batch: TrainingBatch, members: list[int]) -> object:
        padded = pad(batch, members)
        return dataclasses.replace(padded, rows=padded.rows[1:], targets=padded.targets[1:], source=padded.source[1:])

    monkeypatch.setattr("benchmarks._padded_training.pad", shortened)
    with pytest.raises(AssertionError, match="padded: another"):
        same_update(offline.arms(SETTINGS["default"]), make_batch(SETTINGS["default"], 0))


def test_sorted_micro_batches_stay_within_their_size_and_hold_everything_once() -> None:
    lengths = make_batch(SETTINGS["long_tail"], 0).lengths.tolist()
    cut = sorted_cut(lengths, 512)
    assert sorted(itertools.chain(*cut)) == list(range(len(lengths)))
    assert all(len(members) * max(lengths[each] for each in members) <= 512 for members in cut)
    assert sorted_cut([3, 700, 5], 8) == [[1], [2], [0]]  # one that is too long stands alone


@pytest.mark.parametrize("capacity", offline.CAPACITIES)
def test_fixed_micro_batches_hold_as_many_sequences_as_always_fit_in_their_order(capacity: int) -> None:
    batch = make_batch(SETTINGS["long_tail"], 0)
    fixed = recut(batch, "fixed", capacity)
    assert isinstance(fixed, FixedBatch)
    counts = [sum(block.sequences for block in packed.blocks) for packed in fixed.later]
    size = capacity // LONGEST
    assert size * LONGEST <= capacity < (size + 1) * LONGEST
    assert counts == [size] * (len(batch.lengths) // size) + [len(batch.lengths) % size] * (
        len(batch.lengths) % size > 0
    )
    owner = _owner(batch)
    for number, packed in enumerate(fixed.later):
        assert set(owner[packed.source] // size) == {number}
    dynamic = recut(batch, "dynamic", capacity)
    assert not isinstance(dynamic, FixedBatch)
    assert len(dynamic.later) <= len(fixed.later)
    for cut in (fixed, dynamic):
        sources = np.concatenate([packed.source for packed in cut.later])
        assert np.array_equal(np.sort(sources), np.flatnonzero(batch.loss_mask))


def test_overhead_is_what_is_left_of_the_steps_after_the_first() -> None:
    history = {"time/compute_s": {1: 1.0, 2: 3.0, 3: 6.0}, "time/trainer_s": {1: 50.0, 2: 4.0, 3: 8.0}}
    assert overhead_share(history) == pytest.approx(1 - 9 / 12)


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


def _owner(batch: TrainingBatch) -> np.ndarray:
    """[S] the sequence of each token."""
    return np.repeat(np.arange(len(batch.lengths)), batch.lengths)
