"""Which versions' weights are no longer needed, and when the ledger is folded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, call

import pytest

from areal_core.config.schema import load
from areal_core.controller.retention import Retention
from areal_core.controller.snapshots import Snapshots
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.types import Evaluation
from tests.support.servers import version


def test_version_stays_for_the_evaluator_and_for_a_server_that_takes_its_time() -> None:
    ledger, schedule, loading = MagicMock(), MagicMock(), {3, 9}
    ledger.versions.newest.return_value = version(12)
    schedule.awaited.return_value = {0, 4}
    made = retention({"rollout": {"max_staleness": 2}}, ledger=ledger, schedule=schedule, loading=lambda: loading)
    assert made.released() == [1, 2, 5, 6, 7, 8]
    schedule.awaited.assert_called_once_with(8)
    loading.clear()
    assert made.released() == [1, 2, 3, 5, 6, 7, 8]


def retention(config: dict[str, Any], **given: Any) -> Retention:
    """With mocks for all that a test does not give."""
    names = ("ledger", "recorder", "schedule", "storage", "payloads", "snapshots", "pages", "loading")
    return Retention(load(config), 1, **dict.fromkeys(names, MagicMock()) | given)


def evaluation(version: int, accuracy: float) -> Evaluation:
    digest = f"{version:064x}"[::-1]
    return Evaluation(
        version=version, digest=digest, accuracy=accuracy, prompts=1, no_result=0, mean_tokens=1.0, wall_s=1.0
    )


@pytest.mark.parametrize(("keep", "kept"), [(1, [0, 10, 30]), (2, [0, 10, 25, 30]), (9, None), (None, None)])
async def test_pages_of_the_first_the_best_and_the_newest_versions_stay(
    tmp_path: Path, keep: int | None, kept: list[int] | None
) -> None:
    recorder = MagicMock()
    recorder.evaluations = [evaluation(5 * n, 0.9 if n == 2 else 0.1 * n) for n in range(7)]
    names = {known.version: f"v{known.version:06d}-{known.digest[:8]}" for known in recorder.evaluations}
    endings = (".jsonl", ".html", ".table.json")
    for name in (*names.values(), "v000035-00000000", "notes"):  # version 35 is being scored
        for ending in endings:
            (tmp_path / f"{name}{ending}").touch()
    await retention({"evaluation": {"keep_pages": keep}}, recorder=recorder, pages=tmp_path).scored()
    stay = [*(names[version] for version in (names if kept is None else kept)), "v000035-00000000", "notes"]
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}{ending}" for name in stay for ending in endings}


async def test_page_of_replaced_weights_goes_with_the_next_score(tmp_path: Path) -> None:
    recorder = MagicMock(evaluations=[evaluation(5, 0.5)])
    (tmp_path / "v000005-ffffffff.html").touch()
    (tmp_path / "v000005-50000000.html").touch()
    await retention({}, recorder=recorder, pages=tmp_path).scored()
    assert [path.name for path in tmp_path.iterdir()] == ["v000005-50000000.html"]


@pytest.mark.parametrize(
    ("retain", "calls"),
    [("uncommitted", [call.free(4), call.free(4), call.fold({2}), call.free(4), call.fold({2})]), ("all", [])],
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
    made = retention(
        {"training": {"keep_checkpoints": 2}, "rollout": {"retain": retain}},
        ledger=ledger,
        recorder=MagicMock(evaluations=[]),
        schedule=schedule,
        storage=store,
        payloads=AsyncMock(),
        snapshots=Snapshots(MagicMock(root=tmp_path / "run"), store, MagicMock(), retain=False),
        pages=tmp_path,
        loading=list,
    )
    made.committed()
    await made.settled()
    assert [made for made in ledger.mock_calls if made[0] in ("free", "fold")] == calls
    assert ledger.flush.call_count == len(calls[:2])
