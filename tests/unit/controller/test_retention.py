"""Which versions' weights are no longer needed, and when the ledger is folded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, call

import pytest

from areal_core.config.schema import load
from areal_core.controller.core.ledger import Selection, TrajectoryLedger
from areal_core.controller.core.tables import Ending
from areal_core.controller.payloads import PayloadStore
from areal_core.controller.recorder import Recorder
from areal_core.controller.retention import EvaluationSchedule, Retention
from areal_core.controller.snapshots import Snapshots
from areal_core.errors import StorageError
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.types import PolicyVersion
from tests.support.records import evaluation, summary
from tests.support.servers import version


def test_version_stays_for_the_evaluator_and_for_a_server_that_takes_its_time() -> None:
    schedule, loading = scheduled({"rollout": {"max_staleness": 2}}, needed={0, 4}), {3, 9}
    schedule.ledger.versions.newest.return_value = version(12)
    made = Retention(schedule, MagicMock(), lambda: loading)
    assert made.obsolete_versions() == [1, 2, 5, 6, 7, 8]
    schedule.needed.assert_called_once_with(8)
    loading.clear()
    assert made.obsolete_versions() == [1, 2, 3, 5, 6, 7, 8]


def scheduled(config: dict[str, Any], needed: Collection[int] = (), **known: Any) -> MagicMock:
    """A schedule, with mocks for all that a test does not give."""
    return MagicMock(config=load(config), needed=MagicMock(return_value=needed), **known)


@pytest.mark.parametrize(("keep", "kept"), [(1, [0, 10, 30]), (2, [0, 10, 25, 30]), (9, None), (None, None)])
async def test_pages_of_the_first_the_best_and_the_newest_versions_stay(
    tmp_path: Path, keep: int | None, kept: list[int] | None
) -> None:
    recorder = MagicMock()
    recorder.evaluations = [evaluation(5 * n, 0.9 if n == 2 else 0.1 * n, f"{n}" * 64) for n in range(7)]
    names = {known.version: f"v{known.version:06d}-{known.digest[:8]}" for known in recorder.evaluations}
    endings = (".jsonl", ".html", ".table.json")
    for name in (*names.values(), "v000025-ffffffff", "v000035-00000000", "notes"):  # replaced; being scored; another
        for ending in endings:
            (tmp_path / f"{name}{ending}").touch()
    schedule = scheduled({"evaluation": {"keep_pages": keep}}, recorder=recorder)
    await Retention(schedule, MagicMock(run=MagicMock(evaluations=tmp_path)), list).prune_pages()
    stay = [*(names[version] for version in (names if kept is None else kept)), "v000035-00000000", "notes"]
    stay += ["v000025-ffffffff"] if keep != 1 else []
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}{ending}" for name in stay for ending in endings}


@pytest.mark.parametrize(
    ("retain", "calls"),
    [("uncommitted", [call.free(4), call.free(4), call.prune({2}), call.free(4), call.prune({2})]), ("all", [])],
)
async def test_a_committed_checkpoint_has_the_ledger_folded_part_by_part(
    tmp_path: Path, retain: str, calls: Sequence[object]
) -> None:
    store = Storage.open(str(tmp_path))
    for step in (2, 4, 6):
        checkpoint.save(store, step, {}, {}, number=1)
    ledger = MagicMock()
    ledger.free.side_effect = [True, False, False]
    ledger.prune.side_effect = [True, False]
    config = {"training": {"keep_checkpoints": 2}, "rollout": {"retain": retain}}
    run = MagicMock(root=tmp_path / "run")
    run.info.return_value.number = 1
    snapshots = Snapshots(run, store, AsyncMock(), retain=False)
    made = Retention(scheduled(config, {2}, ledger=ledger), snapshots, list)
    made.start_pruning()
    await made.wait_until_pruned()
    assert [made for made in ledger.mock_calls if made[0] in ("free", "prune")] == calls
    assert ledger.flush.call_count == len(calls[:2])


LENT_BY_SLEEPERS = {"mode": "sync", "generation": {"sleep": True}, "evaluation": {"every": 2, "servers": 0}}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[TrajectoryLedger]:
    """Of versions 0 to 5."""
    with closing(TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=1)) as ledger:
        for number in range(6):
            ledger.publish(PolicyVersion(version=number, path=str(tmp_path), digest=str(number)))
        yield ledger


def scored(ledger: TrajectoryLedger, groups: dict[str, Any]) -> list[int]:
    """Every version that is handed out, one after the other."""
    recorder = MagicMock(spec=Recorder, evaluations=[])
    schedule = EvaluationSchedule(load(groups), ledger, recorder)
    while (version := schedule.next()) is not None:
        recorder.evaluations.append(MagicMock(version=version.version, accuracy=0.5))
    return [evaluation.version for evaluation in recorder.evaluations]


def test_regular_versions_are_scored_beside_the_training_and_then_the_last_one(ledger: TrajectoryLedger) -> None:
    beside = {"evaluation": {"every": 2}}
    assert scored(ledger, beside) == [0, 2, 4]
    ledger.notes.end(Ending(reason="steps", version=5, model_url="m"))
    assert scored(ledger, beside) == [0, 5]


def test_a_server_that_sleeps_is_lent_once_the_run_has_ended(ledger: TrajectoryLedger) -> None:
    assert scored(ledger, LENT_BY_SLEEPERS) == []
    schedule = EvaluationSchedule(load(LENT_BY_SLEEPERS), ledger, MagicMock(spec=Recorder, evaluations=[]))
    assert schedule.needed(3) == {0, 2}  # their weights are kept until then
    ledger.notes.end(Ending(reason="steps", version=5, model_url="m"))
    assert scored(ledger, LENT_BY_SLEEPERS) == [0, 2, 4, 5]


ONE = Selection(groups=1, rule="admit", max_staleness=9, max_requeues=0)


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
        group = self.ledger.admit(version=0).group_id
        self.ledger.ready(group, summary(), await self.payloads.append(b"%d" % group), version=0)
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


async def test_a_job_takes_as_long_as_the_store_does_and_the_next_one_waits(run: Run) -> None:
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
    run.gate.clear()
    assert await run.snapshots.take(step, "b", 0.05) is None
    again = asyncio.ensure_future(run.snapshots.take(step, "c", 30.0))  # a restarted trainer's
    await asyncio.sleep(0.05)
    assert len(list(run.dir.root.glob("ledger-snapshot-*.sqlite"))) == 1
    run.gate.set()
    assert await again is not None
    assert len(set(run.puts)) == len(run.puts) == 3
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
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an outage, further checkpoints come between the deletion's look at the store and what it deletes."""
    prune = MagicMock(return_value=0)
    monkeypatch.setattr(checkpoint, "prune", prune)
    made = Retention(scheduled({"rollout": {"retain": "all"}}), run.snapshots, list)
    step = await run.step()
    async with run.snapshots.exclusive:
        made.start_pruning()
        assert await run.snapshots.take(step, "a", 0.05) is None
        assert (run.puts, prune.mock_calls) == ([], [])
    assert await run.snapshots.take(step, "a", 30.0) is not None
    await made.wait_until_pruned()
    prune.assert_called_once()
