"""Snapshots as jobs: one at a time, however often they are asked for, and only what the store lacks is uploaded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import pytest

from areal_core.config.schema import load
from areal_core.controller.core.ledger import Selection, TrajectoryLedger
from areal_core.controller.payloads import PayloadStore
from areal_core.controller.retention import Retention
from areal_core.controller.snapshots import Snapshots
from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.types import GroupSummary, Outcome

ONE = Selection(groups=1, rule="admit", max_staleness=9, max_requeues=0)
SUMMARY = GroupSummary(
    lengths=(1, 1),
    rewards=(1.0, 0.0),
    tokens=2,
    min_version=0,
    max_version=0,
    outcomes={Outcome.CORRECT: 1},
    truncated=(False, False),
)


class Run:
    def __init__(self, folder: Path) -> None:
        self.dir = RunDir(folder)
        (folder / "run.json").write_text(
            json.dumps({"run_id": "r", "model_path": "", "checkpoint_url": "", "number": 3})
        )
        self.storage = Storage.open(str(folder / "store"))
        self.gate = threading.Event()  # files are put only while it is set
        self.gate.set()
        self.puts: list[str] = []
        self.ledger = TrajectoryLedger(self.dir.ledger, group_size=2)
        self.payloads = PayloadStore(self.dir.payloads, 3)
        self.snapshots = Snapshots(self.dir, self.storage, self.payloads, retain=False)
        self._steps = 0

    async def step(self) -> int:
        """Fix the batch of a next step, of one group."""
        self._steps += 1
        group = self.ledger.admit().group_id
        self.ledger.ready(group, SUMMARY, await self.payloads.append(b"%d" % group), version=0)
        assert self.ledger.fix_batch(self._steps, ONE)
        return self._steps


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path)
    put_file = Storage.put_file

    def put_slowly(self: Storage, local: Path, name: str) -> None:
        assert made.gate.wait(30.0)
        made.puts.append(f"{self.url.removeprefix(made.storage.url)}/{name}".lstrip("/"))
        return put_file(self, local, name)

    monkeypatch.setattr(Storage, "put_file", put_slowly)
    yield made
    made.payloads.close()
    made.ledger.close()


async def test_a_job_takes_as_long_as_the_store_does(run: Run) -> None:
    step = await run.step()
    run.gate.clear()
    assert await run.snapshots.take(step, "a", 0.05) is None
    assert await run.snapshots.take(step, "a", 0.05) is None  # asked for again, begun once
    run.gate.set()
    entries = await run.snapshots.take(step, "a", 30.0)
    assert entries is not None
    (ledger,) = entries["files"]
    assert run.puts == [f"checkpoints/step-000001.3/{ledger}"]
    assert await run.snapshots.take(step, "a", 30.0) == entries  # whose response was lost
    assert len(run.puts) == 1


async def test_one_job_at_a_time(run: Run) -> None:
    step = await run.step()
    run.gate.clear()
    assert await run.snapshots.take(step, "a", 0.05) is None
    again = asyncio.ensure_future(run.snapshots.take(step, "b", 30.0))  # a restarted trainer's
    await asyncio.sleep(0.05)
    assert len(list(run.dir.root.glob("ledger-snapshot-*.sqlite"))) == 1
    run.gate.set()
    assert await again is not None
    assert len(set(run.puts)) == len(run.puts) == 2
    assert not list(run.dir.root.glob("ledger-snapshot-*"))


async def test_segments_are_uploaded_once_and_only_those_that_are_needed(run: Run) -> None:
    await run.step()
    await run.payloads.seal()
    await run.step()
    await run.payloads.seal()
    await run.step()
    first = await run.snapshots.take(1, "a", 30.0)
    assert first is not None
    assert list(first["shared"]) == ["payloads/3/000003-000002.bin", "payloads/3/000003-000003.bin"]
    await run.step()
    second = await run.snapshots.take(2, "b", 30.0)
    assert second is not None
    assert list(second["shared"]) == ["payloads/3/000003-000003.bin", "payloads/3/000003-000004.bin"]
    assert run.snapshots.in_use == set(second["shared"])
    assert [name for name in run.puts if name.startswith("payloads/")] == [
        "payloads/3/000003-000002.bin",
        "payloads/3/000003-000003.bin",
        "payloads/3/000003-000004.bin",
    ]


async def test_failed_job_is_an_error_and_the_next_one_is_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step = await run.step()
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "put_file", MagicMock(side_effect=StorageError("storage.url: can't write it")))
        with pytest.raises(StorageError, match="can't write it"):
            await run.snapshots.take(step, "a", 30.0)
    assert await run.snapshots.take(step, "b", 30.0) is not None
    left = run.dir.root / "ledger-snapshot-a.sqlite"
    left.touch()  # by a controller that was killed
    Snapshots(run.dir, run.storage, run.payloads, retain=False)
    assert not left.exists()


async def test_a_job_and_the_deletion_of_old_checkpoints_exclude_each_other(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage, further checkpoints come between the deletion's look at the store and what it deletes."""
    prune = MagicMock(return_value=0)
    monkeypatch.setattr(checkpoint, "prune", prune)
    others = {name: MagicMock() for name in ("recorder", "schedule", "storage", "ledger", "loading")}
    config = load({"rollout": {"retain": "all"}})
    retention = Retention(config, 3, snapshots=run.snapshots, payloads=AsyncMock(), pages=tmp_path, **others)
    step = await run.step()
    async with run.snapshots.exclusive:
        retention.committed()
        assert await run.snapshots.take(step, "a", 0.05) is None
        assert (run.puts, prune.mock_calls) == ([], [])
    assert await run.snapshots.take(step, "a", 30.0) is not None
    await retention.settled()
    prune.assert_called_once()
