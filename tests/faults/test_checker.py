"""The checker notices every kind of violation: what a run has left is doctored one way at a time."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.checker import Findings, check
from tests.faults.history import History
from tests.support.runs import Launched, learning

pytestmark = pytest.mark.recovery
STEPS = 4
CONSUMED = "FROM groups WHERE state = 'consumed'"
OTHER = "UPDATE versions SET digest = 'other' WHERE version"


@dataclass
class Left:
    """The state folder of a run that has ended, and the looks at its ledger meanwhile."""

    state: Path
    history: History

    def check(self, state: Path | None = None) -> Findings:
        at = state or self.state
        return check(at / "runs" / "r", at / "store" / "runs" / "r", self.history.looks, steps=STEPS)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    made = Left(state := tmp_path_factory.mktemp("checked") / "state", History(state / "runs" / "r" / "ledger.sqlite"))
    with Launched(learning(state, training={"steps": STEPS}), "r") as run:
        while run.launcher.poll() is None:
            made.history.look()
            time.sleep(0.02)
        run.finished()
    assert made.check().problems() == []
    return made


DOCTORED = {  # statements of SQL
    "step has no batch": ("lost", f"UPDATE groups SET state = 'ready', step = NULL WHERE step = {STEPS}"),
    "batch lacks a group": (
        "lost",
        f"UPDATE groups SET state = 'dropped', step = NULL WHERE group_id = (SELECT MAX(group_id) {CONSUMED})",
    ),
    "fixed batches were exchanged": ("lost", f"UPDATE groups SET step = {STEPS + 1} - step"),
    "version is gone": ("lost", "DELETE FROM versions WHERE version = 3"),
    "prompt is trained on twice": ("used_twice", "UPDATE groups SET prompt_index = 0"),
    "group is too old": ("staleness", f"UPDATE groups SET min_version = 0 WHERE step = {STEPS}"),
    "group is of the future": ("staleness", "UPDATE groups SET max_version = step"),
    "tokens are missing": ("tokens", "UPDATE totals SET tokens = 0 WHERE state = 'consumed'"),
    "servers sampled more": ("tokens", "UPDATE server_sessions SET counted = counted + 100000"),
    "version was another one": ("versions", f"{OTHER} = 3"),
    "checkpoint is of another version": ("checkpoints", f"{OTHER} = {STEPS}"),
}
DAMAGED = {  # files, and whether they are missing
    "version's file is damaged": ("versions", f"runs/r/weights/v{STEPS:06d}/model.safetensors", False),
    "checkpoint's file is damaged": ("checkpoints", "store/runs/r/checkpoints/step-*/optimizer.safetensors", False),
    "checkpoint's file is missing": ("checkpoints", "store/runs/r/checkpoints/step-*/optimizer.safetensors", True),
    "no checkpoint of the last step": ("lost", f"store/runs/r/checkpoints/step-{STEPS:06d}.*/manifest.json", True),
    "no final model": ("lost", "store/runs/r/final/model.safetensors", True),
    "no summary": ("unresumable", "runs/r/summary.json", True),
}


@pytest.fixture
def copy(left: Left, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left.state, tmp_path / "state"))


@pytest.mark.parametrize("name", DOCTORED)
def test_doctored_ledger_is_noticed(left: Left, copy: Path, name: str) -> None:
    kind, statement = DOCTORED[name]
    with closing(sqlite3.connect(copy / "runs" / "r" / "ledger.sqlite", isolation_level=None)) as ledger:
        ledger.execute(statement)
    assert left.check(copy)[kind]


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_noticed(left: Left, copy: Path, name: str) -> None:
    kind, pattern, missing = DAMAGED[name]
    for file in copy.glob(pattern):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.unlink()
        if not missing:
            file.write_bytes(data)
    assert left.check(copy)[kind]
