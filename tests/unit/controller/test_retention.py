"""Which versions' weights are no longer needed, and when the ledger is folded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock, call

import pytest

from areal_core.config.schema import load
from areal_core.controller.retention import Retention
from areal_core.controller.snapshots import Snapshots
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from tests.support.servers import version


def test_a_version_stays_for_the_evaluator_and_for_a_server_that_takes_its_time() -> None:
    ledger, schedule, loading = MagicMock(), MagicMock(), {3, 9}
    ledger.versions.newest.return_value = version(12)
    schedule.awaited.return_value = {0, 4}
    others = dict.fromkeys(("recorder", "storage", "payloads", "snapshots"), MagicMock())
    config = load({"rollout": {"max_staleness": 2}})
    retention = Retention(config, 1, ledger=ledger, schedule=schedule, loading=lambda: loading, **others)
    assert retention.released() == [1, 2, 5, 6, 7, 8]
    schedule.awaited.assert_called_once_with(8)
    loading.clear()
    assert retention.released() == [1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("retain", "calls"),
    [
        ("uncommitted", [call.free(4), call.free(4), call.fold({2}), call.free(4), call.fold({2})]),
        ("all", []),
    ],
)
async def test_a_committed_checkpoint_has_the_ledger_folded_part_by_part(
    tmp_path: Path, retain: str, calls: Sequence[object]
) -> None:
    store = Storage.open(str(tmp_path))
    for step in (2, 4, 6):
        checkpoint.save(store, step, {}, {}, number=1)
    ledger, schedule = MagicMock(), MagicMock()
    ledger.free.side_effect = [True, False, False]
    ledger.fold.side_effect = [True, False]
    schedule.awaited.return_value = {2}
    retention = Retention(
        load({"training": {"keep_checkpoints": 2}, "rollout": {"retain": retain}}),
        1,
        ledger=ledger,
        recorder=MagicMock(evaluations=[]),
        schedule=schedule,
        storage=store,
        payloads=AsyncMock(),
        snapshots=Snapshots(MagicMock(root=tmp_path / "run"), store, MagicMock(), retain=False),
        loading=list,
    )
    retention.committed()
    await retention.settled()
    assert [made for made in ledger.mock_calls if made[0] in ("free", "fold")] == calls
    assert ledger.flush.call_count == len(calls[:2])
