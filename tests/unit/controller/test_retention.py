"""Which versions' weights are no longer needed."""

from __future__ import annotations

from unittest.mock import MagicMock

from areal_core.config.schema import load
from areal_core.controller.retention import Retention
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
