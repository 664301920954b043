"""The trainer's batch, made of what the controller serves: the fields of `algorithm` take effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_core.api.controller_client import ControllerClient
from areal_core.api.scored_groups import pack_group
from areal_core.config.schema import load
from areal_core.storage.rundir import RunDir
from areal_core.training.batching.trajectories import Trajectories
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.trainer import Trainer
from areal_core.types import BatchGroup, BatchManifest, GroupPayload
from tests.support.training import SPEC

# Two groups of two completions of 1 and 4, 3 and 4 tokens, of at most 4; in the second group both are correct.
LENGTHS, REWARDS = [[1, 4], [3, 4]], [[0.0, 1.0], [1.0, 1.0]]


class Served(ControllerClient):
    """A controller that serves these groups."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def group(self, group_id: int, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        self.asked.append(group_id)
        data, _ = packed(group_id)
        return [data[start:end] for start, end in spans]


def packed(group_id: int) -> tuple[bytes, tuple[int, ...]]:
    lengths = LENGTHS[group_id]
    total = sum(lengths)
    return pack_group(
        GroupPayload(
            prompt_tokens=np.array([7], np.int32),
            lengths=np.array(lengths, np.int32),
            tokens=np.full(total, 9, np.int32),
            loss_mask=np.ones(total, np.bool_),
            logprobs=np.full(total, -1.0, np.float32),
            versions=np.zeros(total, np.int32),
            truncated=np.zeros(2, np.bool_),
        )
    )


def built(
    folder: Path = Path("/nowhere"), cut_off: tuple[bool, bool] = (False, True), **algorithm: Any
) -> TrainingBatch:
    trainer = Trainer.__new__(Trainer)
    trainer._trajectories = Trajectories(RunDir(folder))
    trainer.config = load(
        {
            "algorithm": {"group_size": 2, "advantage": "group_mean", **algorithm},
            "rollout": {"batch_size": 4},
            "task": {"max_new_tokens": 4},
            "training": {"minibatches": 1, "ranks": 1},
        }
    )
    trainer.rank = 0
    trainer.spec = SPEC
    groups = (
        BatchGroup(
            group_id=group,
            lengths=tuple(LENGTHS[group]),
            rewards=tuple(REWARDS[group]),
            truncated=cut_off,
            ready_version=0,
            prompt_tokens=1,
            checksums=packed(group)[1],
            segment=f"000001-{group:06d}",
            start=0,
        )
        for group in (0, 1)
    )
    return trainer._build(BatchManifest(step=1, groups=tuple(groups)), CONTROLLER)


CONTROLLER = Served()


def completions(batch: TrainingBatch, values: np.ndarray) -> list[float]:
    """Of the last token of each completion."""
    return values[np.cumsum(batch.lengths) - 1].tolist()


@pytest.mark.parametrize(
    ("algorithm", "cut_off", "advantages", "loss_tokens", "denominators"),
    [
        ({}, (False, True), [-0.5, 0.5, 0, 0], [12], [12]),
        # Nothing up to 2 tokens, half at 3, all at 4: rewards 0 and 1 - 1, 1 - 0.5 and 1 - 1.
        ({"overlong_cache": 2}, (False, True), [0, 0, 0.25, -0.25], [12], [12]),
        ({"truncated": "mask"}, (True, True), [-0.5, 0.5, 0, 0], [0], [0]),
        ({"loss_mean": "sequence"}, (False, True), [-0.5, 0.5, 0, 0], [12], [4]),
        ({"loss_mean": "constant"}, (False, True), [-0.5, 0.5, 0, 0], [12], [4 * 4]),
        ({"loss_mean": "constant", "truncated": "mask"}, (False, True), [-0.5, 0.5, 0, 0], [4], [2 * 4]),
    ],
)
def test_settings_of_the_algorithm_reach_the_batch(
    algorithm: dict[str, Any],
    cut_off: tuple[bool, bool],
    advantages: list[float],
    loss_tokens: list[int],
    denominators: list[float],
) -> None:
    batch = built(cut_off=cut_off, **algorithm)
    assert completions(batch, batch.advantages) == advantages
    assert (batch.loss_tokens, batch.denominators) == (loss_tokens, denominators)


def test_regularisation_takes_in_completions_without_an_advantage() -> None:
    assert built().has_gradient.tolist() == [True, True, False, False]
    assert built(kl_coef=0.1).has_gradient.all()
    assert built(entropy_coef=0.1).has_gradient.all()


def test_segments_are_read_where_they_are_and_the_controller_is_asked_for_the_others(tmp_path: Path) -> None:
    """One of the two is damaged here: the controller is asked for it, which finds out, too."""
    (folder := tmp_path / "payloads").mkdir()
    (folder / "000001-000000.bin").write_bytes(packed(0)[0])
    (folder / "000001-000001.bin").write_bytes(packed(1)[0][:-1])
    CONTROLLER.asked.clear()
    here = built(tmp_path)
    assert CONTROLLER.asked == [1]
    CONTROLLER.asked.clear()
    elsewhere = built()
    assert CONTROLLER.asked == [0, 1]
    for name, values in here.arrays.items():
        np.testing.assert_array_equal(values, elsewhere.arrays[name])
