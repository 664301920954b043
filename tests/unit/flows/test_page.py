"""What a flow run shows is told when Prefect's server takes it; alerts are events, which automations act on."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from uuid import uuid4

import httpx
import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore
from prefect.states import Cancelling, Running

from areal_core.controller import health
from areal_core.types import Alert
from flows import page
from flows.page import Alerts, Progress, retry
from flows.worker import AUTOMATIONS

_REQUEST = httpx.Request("GET", "http://prefect")
_AWAY = httpx.ConnectError("refused", request=_REQUEST)
_BUSY, _WRONG = (
    httpx.HTTPStatusError(str(code), request=_REQUEST, response=httpx.Response(code)) for code in (503, 422)
)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    client = MagicMock()
    monkeypatch.setattr(page, "get_client", lambda **_: client)
    monkeypatch.setattr(page, "flow_run", SimpleNamespace(id=str(uuid4())))
    return client


def test_progress_is_shown_when_the_server_is_there(client: MagicMock) -> None:
    client.create_artifact.side_effect = [_AWAY, MagicMock()]
    client.update_artifact.side_effect = [_AWAY, None]
    with Progress("areal-progress") as progress:
        for percent in (0.0, 10.0, 20.0, 30.0, 30.0):
            progress.show(percent, f"{percent:g} percent")
    made, updated = client.create_artifact.call_args.args[0], client.update_artifact.call_args.args[1]
    assert (made.key, made.data, made.description) == ("areal-progress", 10.0, "10 percent")
    assert (updated.data, updated.description, client.update_artifact.call_count) == (30.0, "30 percent", 2)


def test_result_is_told_once_the_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_RETRY_S", 0.0)
    said = list[str]()
    assert retry("store the result", MagicMock(side_effect=[_AWAY, _BUSY, _AWAY, "made"]), said.append) == "made"
    assert said == ["Prefect's server does not respond; retrying to store the result: refused"]


@pytest.mark.parametrize(("error", "patience_s"), [(_WRONG, 3600.0), (_AWAY, -1.0)], ids=["refused", "for too long"])
def test_result_that_can_not_be_told_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, patience_s: float
) -> None:
    monkeypatch.setattr(page, "PATIENCE_S", patience_s)
    said: list[str] = []
    assert retry("store the result", MagicMock(side_effect=error), said.append) is None
    assert said == [f"Prefect's server: could not store the result: {error}"]


def test_a_flow_run_that_nobody_cancels_is_noticed(client: MagicMock) -> None:
    now = SimpleNamespace(s=0.0)
    with Progress("areal-progress", clock=lambda: now.s) as progress:
        noticed: list[float] = []
        for now.s in range(0, 100, 2):
            state = Cancelling() if now.s >= 50 else Running()
            client.read_flow_run.side_effect = _AWAY if now.s == 60 else [SimpleNamespace(state=state)]
            if progress.cancel_ignored():
                noticed.append(now.s)
    assert noticed[0] == 70


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Event and text of what was told."""
    events: list[tuple[str, str]] = []

    def emit(event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        assert resource["prefect.resource.id"] == "areal.run.r"
        events.append((event, payload["text"]))

    monkeypatch.setattr(page, "emit_event", emit)
    return events


def test_each_is_told_when_it_begins(events: list[tuple[str, str]]) -> None:
    stall, stale = Alert(kind="stall", step=3, text="no step"), Alert(kind="stale", step=4, text="too old")
    shown = Alerts("r")
    for now in ((), (stall,), (stall,), (stall, stale), (stale,), (stall, stale)):
        shown.show(now)
    assert events == [
        ("areal.alert.stall", "no step"),
        ("areal.alert.stale", "too old"),
        ("areal.alert.stall", "no step"),
    ]


def test_every_kind_has_an_automation_and_each_acts() -> None:
    kinds = {*re.findall(r'_(?:judge|set_alert)\(\s*"(\w+)"', inspect.getsource(health)), "budget"}  # by flows.on_nodes
    known = [AutomationCore.model_validate(one) for one in yaml.safe_load(AUTOMATIONS.read_text())["automations"]]
    assert {automation.name for automation in known} == {f"areal: {kind}" for kind in kinds}
    for automation in known:
        assert automation.enabled
        assert automation.actions
        assert automation.trigger.model_dump()["expect"] == {automation.name.replace("areal: ", "areal.alert.")}
