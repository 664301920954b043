"""Which version is scored next, and which weights are kept for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from areal_core.config.schema import load
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.core.tables import Ending
from areal_core.controller.recorder import Recorder
from areal_core.controller.retention import EvaluationSchedule
from areal_core.types import PolicyVersion

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
    assert schedule.awaited(3) == {0, 2}  # their weights are kept until then
    ledger.notes.end(Ending(reason="steps", version=5, model_url="m"))
    assert scored(ledger, LENT_BY_SLEEPERS) == [0, 2, 4, 5]
