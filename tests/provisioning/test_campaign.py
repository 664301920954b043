"""The short form of `make bench NAME=provisioning`, and what it says of code that lacks one of its safeguards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.provision.leased import LeasedNodes
from flows.provision.leases import Held, Leases
from tests.provisioning import campaign
from tests.provisioning.model import Store

SEED = 1


def found(folder: Path, faults: int) -> list[str]:
    outcomes = campaign.run(folder, faults, SEED, lambda line: None)
    return [line for outcome in outcomes for line in outcome.findings.problems()]


def test_nothing_leaks_and_nothing_of_others_is_changed(tmp_path: Path) -> None:
    assert found(tmp_path, 300) == []


def steal(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Leases, "is_over", lambda self, lease: True)


def overwrite(patched: pytest.MonkeyPatch) -> None:
    def put_over(self: Any, name: str, data: bytes, mark: str | None, put: Any = Store.put_over) -> str:
        return put(self, name, data, self._world.objects.get(name, (b"", None))[1])

    patched.setattr(Store, "put_over", put_over)


def run_on(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Held, "remaining_s", lambda self: 1.0)


def do_not_renew(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Held, "renew", lambda self, **_: None)


def leave_locked(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(LeasedNodes, "_unlock", lambda self: None)


def leave_strays(patched: pytest.MonkeyPatch) -> None:
    def settle(self: Any, **_: Any) -> None:
        self._held.renew()
        self._unlock()

    patched.setattr(LeasedNodes, "_settle", settle)


@pytest.mark.parametrize("mutate", [steal, overwrite, run_on, do_not_renew, leave_locked, leave_strays])
def test_a_safeguard_that_is_not_there_is_missed(
    mutate: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert found(tmp_path, 100)
