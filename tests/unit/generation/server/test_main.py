"""The exit status of the generation server's command."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from areal_core.generation.server import routes


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its arguments; what it does before it serves is left out."""
    given = SimpleNamespace(host="127.0.0.1", port=0, ready_file=None, timeline=None)
    monkeypatch.setattr(routes, "_arguments", lambda: given)
    monkeypatch.setattr(routes.logs, "start", lambda role: None)
    monkeypatch.setattr(routes.process, "adopt", lambda ready_file: None)
    monkeypatch.setattr(routes, "server_token", lambda arguments: None)
    monkeypatch.setattr(routes, "_engine", lambda arguments: None)
    return given


def test_full_disk_is_not_taken_for_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(routes, "_serve", serve)
    with pytest.raises(OSError, match="No space left"):
        routes.main()
