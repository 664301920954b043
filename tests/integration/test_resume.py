"""A run that everything of was killed goes on, whatever its folder or its store has lost meanwhile."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_core.config.schema import RunConfig
from areal_core.run.launcher import read_summary
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from tests.support.runs import Launched, tiny

pytestmark = [pytest.mark.slow, pytest.mark.cpu_seconds(40)]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny(
        tmp_path,
        rollout={"batch_size": 16},
        training={"steps": 8, "checkpoint_every": 2, "keep_checkpoints": 2},
        evaluation={"enabled": False},
    )


def killed(config: RunConfig, step: int) -> RunDir:
    """The run once it has committed a checkpoint of `step` or later, and all of its processes were killed."""
    with Launched(config, "r") as run:
        run.wait_for(f"a checkpoint of step {step}", lambda: (_newest(config) or 0) >= step)
    return run.run


def finished(config: RunConfig) -> str:
    """The output of the run, which goes on and ends in order."""
    with Launched(config, "r") as run:
        assert run.end() == 0, run.output()
        summary = read_summary(run.run)
        assert (summary.steps, summary.reason) == (8, "steps")
        assert summary.tokens.balanced
        return run.output()


def _store(config: RunConfig) -> Storage:
    return Storage.open(f"{config.storage.url}/runs/r")


def _newest(config: RunConfig) -> int | None:
    found = checkpoint.newest(_store(config))
    return None if found is None else found.step


@pytest.mark.recovery
def test_a_ledger_that_is_older_than_the_store_gives_way_to_the_checkpoints(config: RunConfig, tmp_path: Path) -> None:
    """As when a disk was put back, or the run had gone on elsewhere."""
    run = killed(config, 2)
    with sqlite3.connect(run.ledger) as before, sqlite3.connect(tmp_path / "old.sqlite") as kept:
        before.backup(kept)
    killed(config, 6)
    for suffix in ("-wal", "-shm"):
        run.ledger.with_name(run.ledger.name + suffix).unlink(missing_ok=True)
    shutil.copy(tmp_path / "old.sqlite", run.ledger)
    output = finished(config)
    assert "the ledger is not that of the checkpoint of step" in output
    assert (run.root / "ledger-1.sqlite").exists()


@pytest.mark.recovery
def test_a_ledger_that_cannot_be_read_gives_way_to_the_checkpoints(config: RunConfig) -> None:
    run = killed(config, 4)
    run.ledger.with_name(run.ledger.name + "-wal").unlink(missing_ok=True)
    run.ledger.write_bytes(b"not a database" * 1000)
    assert "restored the ledger from the checkpoint of step" in finished(config)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="torn"),
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), id="flipped"),
    ],
)
def test_the_newest_version_is_damaged(config: RunConfig, damage: Callable[[bytes], bytes]) -> None:
    run = killed(config, 4)
    newest = weights.newest(run.weights)
    assert newest is not None
    file = Path(newest.path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    output = finished(config)
    assert f"version {newest.version} is damaged, and will be published again" in output
    assert "taken out" not in output  # no server was given it


@pytest.mark.recovery
@pytest.mark.parametrize("file", [checkpoint.STATE, checkpoint.LEDGER])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its folder", "on a new machine"])
def test_the_newest_checkpoint_is_damaged(config: RunConfig, file: str, elsewhere: bool) -> None:
    run = killed(config, 4)
    step = _newest(config)
    assert step is not None
    at = Path(config.storage.url) / "runs" / "r" / checkpoint.folder_name(step) / file
    at.write_bytes(at.read_bytes()[:-1] + b"?")
    if elsewhere:
        shutil.rmtree(run.root)
    output = finished(config)
    if file == checkpoint.STATE or elsewhere:
        assert f"{checkpoint.folder_name(step)}/{file} is damaged" in output
        assert f"resumed from the checkpoint of step {step - 2}" in output
