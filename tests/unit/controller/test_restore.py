"""What a controller starts from: which of the versions that its ledger knows can still be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from areal_core.controller.restore import forget_damaged
from areal_core.rollout.ledger import TrajectoryLedger
from areal_core.storage import weights


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[TrajectoryLedger]:
    """Of versions 1 to 5."""
    with closing(TrajectoryLedger(tmp_path / "ledger.sqlite", group_size=2)) as ledger:
        for number in range(1, 6):
            ledger.publish(weights.publish(tmp_path / "weights", number, {"w": np.full(4, number, np.float32)}))
        yield ledger


def damage(folder: Path, version: int) -> None:
    """As a loss of power may: blocks that never reached the disk are zeros."""
    file = weights.version_folder(folder / "weights", version) / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))


def loadable(ledger: TrajectoryLedger) -> list[int]:
    return [number for number in range(1, 6) if ledger.versions.get(number) is not None]


def test_whole_versions_stay_what_they_are(ledger: TrajectoryLedger) -> None:
    forget_damaged(ledger)
    assert loadable(ledger) == [1, 2, 3, 4, 5]


def test_a_damaged_version_is_known_as_such_below_a_whole_one_too(ledger: TrajectoryLedger, tmp_path: Path) -> None:
    """An evaluator would be given it again and again, and it could be kept as the best one."""
    damage(tmp_path, 2)
    damage(tmp_path, 5)
    forget_damaged(ledger)
    assert loadable(ledger) == [1, 3, 4]


def test_the_newest_versions_have_to_be_here_and_released_ones_do_not(ledger: TrajectoryLedger, tmp_path: Path) -> None:
    weights.release(tmp_path / "weights", [1, 2, 5])
    forget_damaged(ledger)
    assert loadable(ledger) == [1, 2, 3, 4]
    assert ledger.versions.newest() is None
