"""What a controller starts from: a whole ledger, and which of the versions that it knows can still be loaded."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_core.controller.core.ledger import TrajectoryLedger, snapshot
from areal_core.controller.restore import forget_damaged, restore
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo
from tests.support.runs import tiny


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[TrajectoryLedger]:
    """Of versions 1 to 5."""
    with closing(TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=2)) as ledger:
        for number in range(1, 6):
            ledger.publish(weights.publish(tmp_path / "weights", number, {"w": np.full(4, number, np.float32)}))
        yield ledger


@pytest.mark.parametrize(("damaged", "released"), [((), ()), ((2, 5), ()), ((), (1, 2, 5))])
def test_damaged_versions_are_known_as_such_and_released_ones_need_not_be_here(
    ledger: TrajectoryLedger, tmp_path: Path, damaged: tuple[int, ...], released: tuple[int, ...]
) -> None:
    """An evaluator would be given a damaged one again and again. The newest must be here."""
    for number in damaged:  # as a loss of power may: blocks that never reached the disk are zeros
        file = weights.version_folder(tmp_path / "weights", number) / "model.safetensors"
        file.write_bytes(bytes(file.stat().st_size))
    weights.release(tmp_path / "weights", list(released))
    forget_damaged(ledger)
    gone = {*damaged, *({5} & {*released})}
    assert [n for n in range(1, 6) if ledger.versions.get(n) is None] == sorted(gone)
    assert (ledger.versions.newest() is None) == (5 in gone)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Without a checkpoint, its ledger of 200 groups closed."""
    info = RunInfo(run_id="r", model_path="", checkpoint_url=str(tmp_path / "store"))
    made = RunDir.create(tiny(tmp_path, warm=False), info)
    with closing(TrajectoryLedger(made.ledger, group_size=2)) as ledger:
        for _ in range(200):
            ledger.admit(version=0)
        ledger.counters.join("generation-0", "http://127.0.0.1:1", 0)
    return made


@pytest.mark.parametrize("sound", [0, 4096])  # bytes; with the second the first page has reached the disk
def test_a_damaged_ledger_before_the_first_checkpoint_is_kept_aside(
    run: RunDir, sound: int, caplog: pytest.LogCaptureFixture
) -> None:
    written = run.ledger.read_bytes()
    torn = written[:sound] + b"x" * (len(written) - sound)
    run.ledger.write_bytes(torn)
    with caplog.at_level(logging.WARNING):
        assert restore(run, Storage.open(run.info().checkpoint_url)) is None
    assert (run.root / "ledger-1.sqlite").read_bytes() == torn
    assert not run.ledger.exists()
    assert "the run starts from the beginning" in caplog.text
    with closing(TrajectoryLedger(run.ledger, group_size=2)) as ledger:
        assert ledger.admit(version=0).group_id == 1


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL])
def test_a_ledger_that_is_held_or_has_no_room_is_not_a_damaged_one(
    run: RunDir, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError()
    error.sqlite_errorcode = code
    monkeypatch.setattr("areal_core.controller.restore.TrajectoryLedger", MagicMock(side_effect=error))
    with pytest.raises(sqlite3.OperationalError):
        restore(run, Storage.open(run.info().checkpoint_url))
    assert run.ledger.exists()


def test_whole_ledger_before_the_first_checkpoint_stays(run: RunDir) -> None:
    store = Storage.open(run.info().checkpoint_url)
    assert restore(run, store) is None
    with closing(TrajectoryLedger(run.ledger, group_size=2)) as ledger:
        assert ledger.admitted == 400
    run.ledger.unlink()
    assert restore(run, store) is None
    assert not (run.root / "ledger-1.sqlite").exists()


@pytest.mark.parametrize("torn", [False, True])
def test_checkpoint_replaces_a_lost_or_torn_ledger_and_its_log(run: RunDir, tmp_path: Path, torn: bool) -> None:
    store = Storage.open(run.info().checkpoint_url)
    save_file({"weight/w": np.ones(2, np.float32)}, tmp_path / checkpoint.WEIGHTS)
    ledger = checkpoint.ledger_name("1")
    snapshot(run.ledger, tmp_path / ledger)
    files = {name: tmp_path / name for name in (checkpoint.WEIGHTS, ledger)}
    checkpoint.save(store, 1, files, {checkpoint.VERSION: "0" * 64})
    with closing(TrajectoryLedger(run.ledger, group_size=2)) as later:
        for _ in range(500):
            later.admit(version=0)
        log = run.ledger.with_name(run.ledger.name + "-wal")
        left = log.read_bytes()
    assert left
    data = run.ledger.read_bytes()
    run.ledger.unlink()
    if torn:
        run.ledger.write_bytes(data[: len(data) // 2])
    log.write_bytes(left)  # whoever removed, or renamed, the ledger came no further
    assert restore(run, store) == 1
    with closing(TrajectoryLedger(run.ledger, group_size=2)) as restored:
        assert restored.find_damage() is None
        assert restored.admitted == 400
