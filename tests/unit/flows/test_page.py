"""What a flow run shows is told when Prefect's server takes it, and a server that does not costs nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from uuid import uuid4

import httpx
import pytest
from prefect.states import Cancelling, Running

from flows import page
from flows.page import Progress, told

_REQUEST = httpx.Request("GET", "http://prefect")
_AWAY = httpx.ConnectError("refused", request=_REQUEST)
_BUSY, _WRONG = (
    httpx.HTTPStatusError(str(code), request=_REQUEST, response=httpx.Response(code)) for code in (503, 422)
)


class Server:
    """Prefect's API, as far as a page needs it; away for the next calls that `away` counts."""

    def __init__(self) -> None:
        self.away = 0
        self.made: list[Any] = []
        self.shown: list[tuple[float, str]] = []
        self.state = Running()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None: ...

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise _AWAY

    def create_artifact(self, artifact: Any) -> Any:
        self._answer()
        self.made.append(artifact)
        self.shown.append((artifact.data, artifact.description))
        return SimpleNamespace(id=uuid4())

    def update_artifact(self, artifact_id: Any, artifact: Any) -> None:
        self._answer()
        self.shown.append((artifact.data, artifact.description))

    def read_flow_run(self, flow_run_id: Any) -> Any:
        self._answer()
        return SimpleNamespace(state=self.state)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(page, "get_client", lambda **_: server)
    monkeypatch.setattr(page, "flow_run", SimpleNamespace(id=str(uuid4())))
    return server


def test_progress_is_shown_when_the_server_is_there(server: Server) -> None:
    with Progress("areal-progress") as progress:
        for away, percent in ((1, 0.0), (0, 10.0), (1, 20.0), (0, 30.0)):
            server.away = away
            progress.show(percent, f"{percent:g} percent")
    assert server.shown == [(10.0, "10 percent"), (30.0, "30 percent")]
    assert [artifact.key for artifact in server.made] == ["areal-progress"]


def test_result_is_told_once_the_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_AGAIN_S", 0.0)
    said = list[str]()
    assert told("the result", MagicMock(side_effect=[_AWAY, _BUSY, _AWAY, "made"]), said.append) == "made"
    assert said == ["Prefect's server does not answer; waiting to tell it the result: refused"]


@pytest.mark.parametrize(("error", "patience_s"), [(_WRONG, 3600.0), (_AWAY, -1.0)], ids=["refused", "for too long"])
def test_result_that_can_not_be_told_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, patience_s: float
) -> None:
    monkeypatch.setattr(page, "PATIENCE_S", patience_s)
    said: list[str] = []
    assert told("the result", MagicMock(side_effect=error), said.append) is None
    assert said == [f"Prefect's server does not know the result: {error}"]


def test_a_flow_run_that_nobody_cancels_is_noticed(server: Server) -> None:
    now = SimpleNamespace(s=0.0)
    with Progress("areal-progress", clock=lambda: now.s) as progress:
        noticed: list[float] = []
        for now.s in range(0, 100, 2):
            if now.s == 50:
                server.state = Cancelling()
            server.away = int(now.s == 60)
            if progress.cancelled_unheard():
                noticed.append(now.s)
    assert noticed[0] == 70
