"""What is wrong with a run, as events of Prefect's, and the automations that act on them (`automations.yaml`).

    areal.alert.KIND    something is wrong that was not before; KIND as in areal_core.controller.health
    areal.well.KIND     it is so no longer

The resource is `areal.run.RUN_ID`; the flow run and its deployment are related to it, so that automations find them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.events import emit_event
from prefect.events.schemas.automations import AutomationCore

from areal_core.types import Alert

AUTOMATIONS = Path(__file__).with_name("automations.yaml")


class Alerts:
    """The alerts of the run of this flow run, told once each. Prefect sends them in a thread of its own: a server that
    is away holds nothing up."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._known: dict[str, Alert] = {}  # by kind

    def show(self, alerts: Iterable[Alert]) -> None:
        now = {alert.kind: alert for alert in alerts}
        for kind in now.keys() - self._known.keys():
            self._tell(f"areal.alert.{kind}", now[kind])
        for kind in self._known.keys() - now.keys():
            self._tell(f"areal.well.{kind}", self._known[kind])
        self._known = now

    def _tell(self, event: str, alert: Alert) -> None:
        resource = {"prefect.resource.id": f"areal.run.{self._run_id}", "prefect.resource.name": self._run_id}
        emit_event(event, resource, payload={"step": alert.step, "text": alert.text})


async def make_automations(client: PrefectClient) -> None:
    """Make the automations known, or as the file has them; those that somebody has paused stay so."""
    known = {automation.name: automation for automation in await client.read_automations()}
    for wanted in map(AutomationCore.model_validate, yaml.safe_load(AUTOMATIONS.read_text())["automations"]):
        if before := known.get(wanted.name):
            wanted.enabled = before.enabled
            await client.update_automation(before.id, wanted)
        else:
            await client.create_automation(wanted)
