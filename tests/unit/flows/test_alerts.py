"""Alerts as events of Prefect's, and what its automations do about each kind."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import yaml
from prefect.events.schemas.automations import AutomationCore

from areal_core.controller import health
from areal_core.types import Alert
from flows import page
from flows.page import Alerts
from flows.worker import AUTOMATIONS


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Event and text of what was told."""
    events: list[tuple[str, str]] = []

    def emit(event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        assert resource["prefect.resource.id"] == "areal.run.r"
        events.append((event, payload["text"]))

    monkeypatch.setattr(page, "emit_event", emit)
    return events


def test_each_is_told_when_it_begins_and_ends(told: list[tuple[str, str]]) -> None:
    stall, stale = Alert(kind="stall", step=3, text="no step"), Alert(kind="stale", step=4, text="too old")
    shown = Alerts("r")
    for now in ((), (stall,), (stall,), (stall, stale), (stale,), ()):
        shown.show(now)
    assert told == [
        ("areal.alert.stall", "no step"),
        ("areal.alert.stale", "too old"),
        ("areal.well.stall", "no step"),
        ("areal.well.stale", "too old"),
    ]


def test_every_kind_has_an_automation_and_each_acts() -> None:
    kinds = {*re.findall(r'_(?:judge|tell)\(\s*"(\w+)"', inspect.getsource(health)), "budget"}  # that of flows.on_nodes
    known = [AutomationCore.model_validate(one) for one in yaml.safe_load(AUTOMATIONS.read_text())["automations"]]
    assert {automation.name for automation in known} == {f"areal: {kind}" for kind in kinds}
    for automation in known:
        assert automation.enabled
        assert automation.description
        assert automation.actions
        assert automation.trigger.model_dump()["expect"] == {automation.name.replace("areal: ", "areal.alert.")}
