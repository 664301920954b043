"""What the flow `areal-reap` says of what its reaper has done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger

from areal_core.errors import StorageError
from flows import reap
from flows.provision.reaper import Reaped

ENDED = Reaped(
    run="first", owner="a@example.org", over_since="2030-01-31T12:00:00Z", ended="1 aws_instance", cost="$1.00"
)
FAILED = Reaped(
    run="second", owner="b@example.org", over_since="it was put down", ended="", cost="-", failed="no rights"
)


class FakeReaper:
    def __init__(self, reaped: list[Reaped] | StorageError) -> None:
        self._reaped = reaped
        self.forget: Callable[[str], None] = pytest.fail  # until the flow has said how

    def reap(self) -> list[Reaped]:
        if isinstance(self._reaped, StorageError):
            raise self._reaped
        for one in self._reaped:
            if not one.failed:
                self.forget(one.run)
        return self._reaped


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Prefect is told, in words."""
    said: list[str] = []
    monkeypatch.setattr(reap, "told", lambda what, *_: said.append(what))
    monkeypatch.setattr(reap, "get_client", lambda **_: contextlib.nullcontext())
    return said


def ended(monkeypatch: pytest.MonkeyPatch, reaper: FakeReaper | None) -> State[Any]:
    def reaper_of(state: Path, store: str | None, log: Any, forget: Any) -> FakeReaper | None:
        if reaper is not None:
            monkeypatch.setattr(reaper, "forget", forget)
        return reaper

    monkeypatch.setattr(reap, "reaper_of", reaper_of)
    with disable_run_logger():
        return reap.areal_reap.fn()


def test_where_no_cloud_is_known_it_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reap, "STATE", tmp_path)
    with disable_run_logger():
        state = reap.areal_reap.fn()
    assert state.is_completed()
    assert state.message == "nothing to reap: no cloud is known here"


@pytest.mark.parametrize(
    ("reaped", "completed", "message", "told_of"),
    [
        ([ENDED], True, "first", True),
        ([ENDED, FAILED], False, "run second: nothing ended; to be tried again: no rights", True),
        (StorageError("storage.url: can't list s3://b: no response in time"), False, "storage.url: can't list", False),
        ([], True, "nothing to reap", False),
    ],
)
def test_flow_ends_with_what_the_reaper_has_done(
    monkeypatch: pytest.MonkeyPatch, told: list[str], reaped: Any, completed: bool, message: str, told_of: bool
) -> None:
    state = ended(monkeypatch, FakeReaper(reaped))
    assert (state.is_completed(), state.is_failed()) == (completed, not completed)
    assert str(state.message).startswith(message)
    assert told == (["that run first is over", "what was reaped"] if told_of else [])
