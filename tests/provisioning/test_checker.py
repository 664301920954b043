"""What the campaign would say of code that lacks one of its safeguards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_core.storage.folder import Folder
from flows.provision.leased import LeasedNodes
from flows.provision.leases import Leases
from flows.provision.terraform import Terraform
from tests.provisioning.campaign import Cast, play

pytestmark = [pytest.mark.slow, pytest.mark.recovery, pytest.mark.nightly]


def steal(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Leases, "is_over", lambda self, lease: True)


def overwrite(patched: pytest.MonkeyPatch) -> None:
    def put_over(self: Folder, path: str, data: bytes, mark: str | None) -> str:
        self.put_bytes(path, data)
        return self.get_marked(path)[1]

    patched.setattr(Folder, "put_over", put_over)


def run_on(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Terraform, "_tell", lambda self, right: None)


def leave_locked(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LeasedNodes, "_unlock", lambda self: None)


def leave_strays(patched: pytest.MonkeyPatch) -> None:
    def settle(self: Any) -> None:
        self._held.renew()
        self._unlock()

    patched.setattr(LeasedNodes, "_settle", settle)


CASES: list[tuple[Callable[[pytest.MonkeyPatch], None], list[tuple[str, str]], Cast, str]] = [
    (steal, [("plan:locked", "slow")], Cast(reapers=1), "intruders"),
    (overwrite, [("plan:end", "stop owner")], Cast(reapers=1, leaves=True, stopped_s=5.0), "intruders"),
    (run_on, [("apply:middle", "stall")], Cast(reapers=1, leaves=True, stopped_s=5.0), "intruders"),
    (leave_locked, [("apply:middle", "kill both")], Cast(), "unfinished"),
    (leave_strays, [("apply:unanswered", "kill both")], Cast(), "unfinished"),
]


@pytest.mark.parametrize(("mutate", "planned", "cast", "found"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_safeguard_that_is_not_there_is_missed(
    mutate: Callable[[pytest.MonkeyPatch], None],
    planned: list[tuple[str, str]],
    cast: Cast,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = [{"actor": "flow", "place": place, "kind": kind, "nth": 0} for place, kind in planned]
    sound = play(tmp_path / "sound", 2, faults, cast)
    assert sound.missed == []
    assert sound.findings.problems() == []
    mutate(monkeypatch)
    assert getattr(play(tmp_path / "mutant", 2, faults, cast).findings, found)
