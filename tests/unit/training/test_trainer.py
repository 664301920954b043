"""What the trainer does beside its steps, and with a checkpoint that is damaged for others."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_core.run.prepare import prepare
from areal_core.storage import checkpoint
from areal_core.training import publisher
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.metrics import StepTimes
from areal_core.training.trainer import Trainer
from areal_core.types import BatchGroup, BatchManifest, PolicyVersion
from tests.support.records import packed
from tests.support.runs import tiny
from tests.support.training import batch

PATIENCE_S = 20.0


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    controller = SimpleNamespace(announce=lambda version: [], metrics=lambda rows: None, document=lambda *_: None)
    monkeypatch.setattr(publisher, "ControllerClient", lambda run: controller)
    return Trainer(prepare(tiny(tmp_path), run_id="r"), 0)


def sound(step: int) -> TrainingBatch:
    share = batch(step)
    marked = np.where(share.loss_mask, np.float32(1), np.float32(0))
    return replace(share, tokens=share.tokens % 10, advantages=marked, behaviour_logprobs=-marked)


def manifest(step: int) -> BatchManifest:
    fields = packed((4, 4), group_id=step, ready_version=step - 1, segment="", start=0)
    group = BatchGroup(**fields)
    return BatchManifest(step=step, groups=(group,))


def test_the_next_step_trains_while_a_version_is_written_and_no_two_are_at_once(
    one: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 is written and hashed once step 2 has trained; version 2 waits for it."""
    done: list[tuple[str, int]] = []
    begun, may_write = threading.Event(), threading.Event()

    def publish(folder: Path, version: int, *_: Any, **__: Any) -> PolicyVersion:
        begun.set()
        assert may_write.wait(PATIENCE_S)
        done.append(("written", version))
        return PolicyVersion(version=version, path=str(folder), digest="0" * 64)

    def learn(batch: TrainingBatch, times: StepTimes) -> Any:
        stats = learns(batch, times)
        done.append(("trained", batch.step))
        if batch.step == 2:
            assert begun.wait(PATIENCE_S)
            may_write.set()
        return stats

    monkeypatch.setattr(publisher.weights, "publish", publish)
    learns = one._learn
    monkeypatch.setattr(one, "_learn", learn)
    for step in (1, 2):
        one._train_step(manifest(step), sound(step), 0.0)
    assert one.publisher is not None
    one.publisher.drain()
    assert done == [("trained", 1), ("trained", 2), ("written", 1), ("written", 2)]


def test_training_goes_on_while_a_checkpoint_is_written(one: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one due at steps 3, 6 and 9, that of step 3 is written until step 7 has trained."""
    saved = list[int]()
    monkeypatch.setattr(publisher.Publisher, "checkpoint", lambda self, step, state: saved.append(step))
    monkeypatch.setattr(publisher.Publisher, "saving", property(lambda self: saved == [3] and one.step < 8))
    for step in range(1, 10):
        one._train_step(manifest(step), sound(step), 0.0)
    assert saved == [3, 8, 9]


@pytest.mark.parametrize(
    ("rank", "others", "newest"),
    [
        pytest.param(0, ([0, 0], [1], [0, 0], [0]), 1, id="rank 0 sets it aside"),
        pytest.param(1, ([2, 0], [1], [1, 0], [0]), 2, id="another one leaves that to it"),
    ],
)
def test_resume_skips_a_checkpoint_that_another_rank_finds_damaged(
    one: Trainer, monkeypatch: pytest.MonkeyPatch, rank: int, others: tuple[list[int], ...], newest: int
) -> None:
    """`others`: what is the largest of the other ranks, at each of the collectives."""
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
