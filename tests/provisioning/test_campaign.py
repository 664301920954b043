"""The short form of `make bench NAME=provisioning`, and what it says of code that lacks one of its safeguards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.provision.leased import LeasedNodes
from flows.provision.leases import Held, Leases
from tests.provisioning import campaign


def found(folder: Path, faults: int) -> list[str]:
    outcomes = campaign.run(folder, faults, 1, lambda line: None)
    return [line for outcome in outcomes for line in outcome.findings.problems()]


def test_nothing_leaks_and_nothing_of_others_is_changed(tmp_path: Path) -> None:
    assert found(tmp_path, 300) == []


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (Leases, "is_over", lambda *_: True),  # it steals
        (Held, "remaining_s", lambda *_: 1.0),  # and runs on
        (Held, "renew", lambda *_, **__: None),
        (LeasedNodes, "_unlock", lambda *_: None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_safeguard_that_is_not_there_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, instead)
    assert found(tmp_path, 100)
