"""Coefficients that a control has changed survive the trainer: they are part of its checkpoints."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from tests.support.runs import Launched, tiny

STEPS = 8


def curves(root: Path, *, killed: bool) -> dict[tuple[str, int], float]:
    """The points of a run, whose trainer is killed once it has a checkpoint of step 2."""
    config = tiny(
        root,
        mode="sync",
        algorithm={"control": "adaptive_kl", "kl_coef": 0.1, "kl_target": 1e-4, "entropy_coef": 0.01},
        generation={"servers": 1, "deterministic": True},
        rollout={"batch_size": 16},
        training={"steps": STEPS, "ranks": 1, "checkpoint_every": 2, "learning_rate": 1e-2},
        evaluation={"enabled": False},
    )
    with Launched(config, "r") as run:
        if killed:
            store = Storage.open(f"{config.storage.url}/runs/r")
            run.wait_for("a checkpoint", lambda: checkpoint.newest(store))
            run.until_step(3)
            os.kill(run.pid("trainer"), signal.SIGKILL)
        run.finished()
        assert ("resumed from the checkpoint of step" in run.output()) == killed
    with sqlite3.connect(run.run.outbox) as outbox:
        chosen = "('control/kl_coef', 'loss/reference_kl', 'loss/policy')"
        rows = outbox.execute(f"SELECT key, step, value FROM metrics WHERE key IN {chosen}").fetchall()
    return {(key, step): value for key, step, value in rows}


@pytest.mark.slow
@pytest.mark.recovery
def test_an_adaptive_coefficient_is_the_same_after_the_trainer_was_killed(tmp_path: Path) -> None:
    whole, resumed = curves(tmp_path / "whole", killed=False), curves(tmp_path / "killed", killed=True)
    assert resumed == whole
    coefficients = [whole["control/kl_coef", step] for step in range(1, STEPS + 1)]
    assert coefficients[0] == 0.1
    assert min(coefficients) < coefficients[-1] != 0.1  # it has gone down, then up
