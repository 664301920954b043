"""Watching a flow run: a server that is busy for a while is not gone, and Ctrl-C never leaves a flow run behind."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES
from rich.console import Console

from flows import watch


class _Client:
    """Prefect's API: makes flow runs, and is interrupted at a call of choice."""

    def __init__(self, *interrupted: str) -> None:
        self._interrupted = [*interrupted]
        self.runs: dict[str, UUID] = {}
        self.states: dict[UUID, Any] = {}
        self.retries: dict[str, int] = {}

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _interrupt(self, call: str) -> None:
        self.retries[call] = PREFECT_CLIENT_MAX_RETRIES.value()
        if call in self._interrupted:
            self._interrupted.remove(call)
            raise KeyboardInterrupt

    def read_deployment_by_name(self, name: str) -> Any:
        return SimpleNamespace(id=uuid4())

    def create_flow_run_from_deployment(
        self, deployment_id: UUID, *, name: str, parameters: Any, job_variables: Any, idempotency_key: str
    ) -> Any:
        made = self.runs.setdefault(idempotency_key, uuid4())
        self._interrupt("create")  # made, and not yet known here
        return SimpleNamespace(id=made, name=name)

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        self._interrupt("read")
        return SimpleNamespace(state=self.states[flow_run_id])

    def set_flow_run_state(self, flow_run_id: UUID, state: Any) -> None:
        assert state.type == "CANCELLING"
        self.states[flow_run_id] = SimpleNamespace(name="Cancelled", is_final=lambda: True)


@pytest.mark.parametrize("interrupted", ["create", "read"])
def test_interrupt_cancels_the_flow_run(monkeypatch: pytest.MonkeyPatch, interrupted: str) -> None:
    client = _Client(interrupted)
    monkeypatch.setattr("prefect.get_client", lambda **_: client)
    monkeypatch.setattr("prefect.utilities.urls.url_for", lambda _: None)
    up: Any = SimpleNamespace(pages="", owner="up")
    with pytest.raises(KeyboardInterrupt):
        watch._run("areal/train", {}, up, Console(quiet=True), list)
    assert len(client.runs) == 1
    assert [state.name for state in client.states.values()] == ["Cancelled"]
    assert set(client.states) == set(client.runs.values())
    # A server whose database is locked answers with status 503. What is polled is asked again anyway.
    assert client.retries == {"create": PREFECT_CLIENT_MAX_RETRIES.default(), "read": 0}


@pytest.mark.parametrize(("interrupted", "at_once"), [(["read"], False), (["read", "read"], True)])
def test_a_second_interrupt_kills_the_servers_of_the_command(
    monkeypatch: pytest.MonkeyPatch, interrupted: list[str], at_once: bool
) -> None:
    client, stopped = _Client(*interrupted), []
    up = SimpleNamespace(pages="", owner="train", environment={}, prefect_api=None)
    launch = SimpleNamespace(wait_ready=lambda: up, new_messages=list, stop=lambda *, at_once: stopped.append(at_once))
    monkeypatch.setattr("prefect.get_client", lambda **_: client)
    monkeypatch.setattr("prefect.utilities.urls.url_for", lambda _: None)
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(watch.stack, "running", lambda: None)
    monkeypatch.setattr(watch.stack, "Launch", lambda _: launch)
    assert watch.run_command("train", "areal/train", dict) == 130
    assert stopped == [at_once]


def test_tables_of_results_send_nothing_to_the_terminal() -> None:
    hostile = "[red]\x1b]0;owned\x07"
    result: Any = SimpleNamespace(description=hostile, data=json.dumps([{"what": "model", hostile: hostile}]))
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(watch._table(result))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count(r"[red]\x1b]0;owned\x07") == 3
    assert "\x1b]0;" not in shown
