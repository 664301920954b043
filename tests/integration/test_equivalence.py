"""Asynchronous with eta = 0 is the synchronous mode: the same tokens, the same losses, the same weights."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from areal_core.api.scored_groups import read_group_file
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.run.launcher import execute, run_folder
from areal_core.types import GroupPayload
from tests.support.runs import tiny

pytestmark = pytest.mark.slow
STEPS = 3
GROUP = 4


def run(root: Path, mode: str) -> tuple[list[list[GroupPayload]], list[float], list[str]]:
    """Trajectories by step, losses by step and hashes of the published weights of a short run with one server."""
    config = tiny(
        root / "state",
        mode=mode,
        storage={"url": str(root / mode)},
        model={"hidden_size": 32, "layers": 2, "intermediate_size": 64},
        warmup={"worked_steps": 60, "worked_batch": 16, "direct_steps": 10},
        task={"held_out": 16, "max_new_tokens": 112},
        generation={"servers": 1, "slots": 16},
        rollout={"max_staleness": 0, "retain": "all"},
        training={"steps": STEPS, "ranks": 1, "learning_rate": 3e-3},
        evaluation={"enabled": False},
        launch={"restarts": 0},
    )
    assert execute(config, run_id=mode, log=lambda line: None).steps == STEPS
    folder = run_folder(config, mode)
    ledger = TrajectoryLedger(folder.ledger, group_size=GROUP)
    batches = [ledger.batch(step) for step in range(1, STEPS + 1)]
    trajectories = [
        [read_group_file(folder.payloads, group, range(GROUP)) for group in batch.groups] for batch in batches
    ]
    hashes = [ledger.versions.get(step).digest for step in range(STEPS + 1)]
    ledger.close()
    with sqlite3.connect(folder.outbox) as outbox:
        rows = outbox.execute("SELECT value FROM metrics WHERE key = 'loss/policy' ORDER BY step").fetchall()
    return trajectories, [value for (value,) in rows], hashes


def test_zero_staleness_is_the_synchronous_mode(tmp_path: Path) -> None:
    asynchronous, async_losses, async_hashes = run(tmp_path, "async")
    synchronous, sync_losses, sync_hashes = run(tmp_path, "sync")
    assert len(asynchronous) == len(synchronous) == STEPS
    for step, (left, right) in enumerate(zip(asynchronous, synchronous, strict=True)):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a.prompts[0], b.prompts[0])
            np.testing.assert_array_equal(a.tokens, b.tokens)
            assert set(a.versions) == set(b.versions) == {step}
    assert len(async_losses) == STEPS
    assert any(loss != 0 for loss in async_losses), "nothing was learnt: the comparison would be empty"
    np.testing.assert_allclose(async_losses, sync_losses, atol=1e-5, rtol=0)
    assert async_hashes == sync_hashes
