"""The checker notices every kind of violation: a small run's folder and store, doctored one way at a time."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3

from areal_core.controller.core.ledger import Selection, TrajectoryLedger
from areal_core.controller.core.tables import Place
from areal_core.types import GroupSummary, PolicyVersion
from tests.faults.checker import Findings, check
from tests.faults.history import History

_STEPS, _GROUPS, _TOKENS = 4, 2, 10  # a group's tokens
_SELECTION = Selection(groups=_GROUPS, rule="wait", max_staleness=2, max_requeues=0)


@dataclass
class Left:
    """What a run of four steps has left, and the history of it."""

    run: Path
    store: Path
    history: History

    def check(self) -> Findings:
        return check(self.run, self.store, self.history.looks, steps=_STEPS)

    def sql(self, statement: str) -> None:
        with closing(sqlite3.connect(self.run / "ledger.sqlite", isolation_level=None)) as ledger:
            ledger.execute(statement)


_PLACE = Place(segment="1", start=0, bytes=1, crc32=0)


def _weights(left: Left, version: int) -> PolicyVersion:
    """A version, and a checkpoint of it."""
    data = f"weights {version}".encode()
    sha256, digest = hashlib.sha256(data).hexdigest(), blake3(data).hexdigest()
    for folder, names in (
        (left.run / "weights" / f"v{version:06d}", {"version": version, "digest": digest, "bytes": len(data)}),
        (
            left.store / "checkpoints" / f"step-{version:06d}.1",
            {
                "step": version,
                "files": {"model.safetensors": {"bytes": len(data), "sha256": sha256}},
                "shared": {},
                "extra": {"version_digest": digest},
            },
        ),
    ):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(data)
        (folder / "manifest.json").write_text(json.dumps(names))
    return PolicyVersion(version=version, path=str(left.run / "weights" / f"v{version:06d}"), digest=digest)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    made = Left(tmp_path / "run", tmp_path / "store", History(tmp_path / "run" / "ledger.sqlite"))
    (made.run / "weights").mkdir(parents=True)
    (made.store / "final").mkdir(parents=True)
    (made.store / "final" / "model.safetensors").write_bytes(b"final")
    config = {"mode": "async", "rollout": {"batch_selection": "wait", "max_staleness": None}}
    (made.run / "config.json").write_text(json.dumps(config))
    ledger = TrajectoryLedger(made.run / "ledger.sqlite", group_size=1)
    ledger.publish(PolicyVersion(version=0, path="base", digest="base"))
    ledger.counters.join("generation-0", "url", 0)
    for step in range(1, _STEPS + 1):
        for _ in range(_GROUPS):
            summary = GroupSummary(
                lengths=(_TOKENS,),
                rewards=(1.0,),
                tokens=_TOKENS,
                min_version=step - 1,
                max_version=step - 1,
                outcomes={},
                truncated=(False,),
            )
            ledger.ready(ledger.admit().group_id, summary, _PLACE, version=step - 1)
        assert ledger.fix_batch(step, _SELECTION)
        ledger.publish(_weights(made, step))
        made.history.look()
    sampled = _STEPS * _GROUPS * _TOKENS
    ledger.counters.report("generation-0", sampled, sampled)
    made.history.look()
    (made.run / "summary.json").write_text(json.dumps({"tokens": {"consumed": sampled, "generated": sampled}}))
    yield made
    ledger.close()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DOCTORED: dict[str, tuple[str, str | Callable[[Path], object]]] = {  # statements of SQL, and what is done to a file
    "step has no batch": ("lost", "UPDATE groups SET state = 'ready', step = NULL WHERE step = 4"),
    "batch lacks a group": ("lost", "UPDATE groups SET state = 'dropped', step = NULL WHERE group_id = 3"),
    "fixed batch has changed": ("lost", "UPDATE groups SET step = 5 - step WHERE group_id IN (3, 5)"),
    "version is gone": ("lost", "DELETE FROM versions WHERE version = 3"),
    "no checkpoint of the last step": ("lost", Path.unlink),
    "no final model": ("lost", Path.unlink),
    "prompt is trained on twice": ("used_twice", "UPDATE groups SET prompt_index = 0 WHERE group_id = 8"),
    "group has moved to another step": ("used_twice", "UPDATE groups SET step = 4 WHERE group_id = 1"),
    "group is too old": ("staleness", "UPDATE groups SET min_version = 0 WHERE group_id = 8"),
    "group is of the future": ("staleness", "UPDATE groups SET max_version = 4 WHERE group_id = 8"),
    "tokens are missing": ("tokens", "UPDATE groups SET tokens = 9 WHERE group_id = 8"),
    "servers sampled more": ("tokens", "UPDATE server_sessions SET counted = counted + 1"),
    "version was another one": ("versions", "UPDATE versions SET digest = 'other' WHERE version = 3"),
    "version's file is damaged": ("versions", flip),
    "checkpoint's file is damaged": ("checkpoints", flip),
    "checkpoint's file is missing": ("checkpoints", Path.unlink),
    "checkpoint is of another version": ("checkpoints", "UPDATE versions SET digest = 'other' WHERE version = 2"),
    "no summary": ("unresumable", Path.unlink),
}
FILES = {  # of those that do something to one
    "no checkpoint of the last step": "store/checkpoints/step-000004.1/manifest.json",
    "no final model": "store/final/model.safetensors",
    "version's file is damaged": "run/weights/v000004/model.safetensors",
    "checkpoint's file is damaged": "store/checkpoints/step-000002.1/model.safetensors",
    "checkpoint's file is missing": "store/checkpoints/step-000002.1/model.safetensors",
    "no summary": "run/summary.json",
}


@pytest.mark.parametrize("name", DOCTORED)
def test_violation_is_noticed(tmp_path: Path, left: Left, name: str) -> None:
    assert left.check().problems() == []
    kind, doctor = DOCTORED[name]
    if isinstance(doctor, str):
        left.sql(doctor)
    else:
        doctor(tmp_path / FILES[name])
    assert getattr(left.check(), kind)


def test_new_incarnation_may_fix_other_batches(left: Left) -> None:
    left.sql("UPDATE run SET incarnation = 1")
    left.sql("UPDATE groups SET step = CASE step WHEN 3 THEN 4 ELSE 3 END WHERE step >= 3")
    left.sql("UPDATE groups SET min_version = 2, max_version = 2 WHERE step >= 3")
    left.history.look()
    assert left.check().problems() == []
    left.sql("UPDATE run SET incarnation = 0")
    assert left.check().lost  # it is forgotten
