"""The exit status of the generation server's command."""

from __future__ import annotations

import errno

import pytest

from areal_core.generation.server import routes


def test_full_disk_is_not_taken_for_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.argv", ["routes", "--model", "m"])
    monkeypatch.setattr(routes.logs, "start", lambda role: None)
    monkeypatch.setattr(routes.process, "adopt", lambda ready_file: None)
    monkeypatch.setattr(routes, "_engine", lambda arguments: None)
    monkeypatch.setattr(routes, "_serve", serve)
    with pytest.raises(OSError, match="No space left"):
        routes.main()
