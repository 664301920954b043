"""What the flow `areal-reap` says of what its reaper has done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger
from prefect.utilities.callables import parameter_schema

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


def test_what_was_ended_is_told_by_run(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    state = ended(monkeypatch, FakeReaper([ENDED]))
    assert (state.is_completed(), state.message) == (True, "first")
    assert told == ["that run first is over", "what was reaped"]


def test_what_failed_fails_it_until_the_next_one(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    state = ended(monkeypatch, FakeReaper([ENDED, FAILED]))
    assert state.is_failed()
    assert state.message == "run second: nothing ended; to be tried again: no rights"
    assert told == ["that run first is over", "what was reaped"]


def test_a_store_that_is_away_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    state = ended(monkeypatch, FakeReaper(StorageError("storage.url: can't list s3://b: no response in time")))
    assert (state.is_failed(), state.message) == (True, "storage.url: can't list s3://b: no response in time")
    assert told == []
    assert ended(monkeypatch, FakeReaper([])).message == "nothing to reap"


def test_its_form() -> None:
    form = parameter_schema(reap.areal_reap).model_dump()
    assert form["properties"]["store"]["description"].startswith("Where the leases are, as s3://bucket.")
    assert not form.get("required")
