"""What the flow `areal-reap` says of what its reaper has done."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from areal_core.errors import StorageError
from flows import reap
from flows.provision.reaper import Reaped

ENDED = Reaped(run="first", ended="1 aws_instance", cost="$1.00")
FAILED = Reaped(run="second", failed="no rights")


@pytest.mark.parametrize(
    ("reaped", "completed", "message", "told"),
    [
        (None, True, "nothing to reap: no cloud is known here", []),
        ([], True, "nothing to reap", []),
        ([ENDED], True, "first", ["that run first is over", "what was reaped"]),
        ([FAILED], False, "run second: nothing ended; to be tried again: no rights", ["what was reaped"]),
        (StorageError("storage.url: can't list s3://b"), False, "storage.url: can't list s3://b", []),
    ],
)
def test_flow_ends_with_what_the_reaper_has_done(
    monkeypatch: pytest.MonkeyPatch, reaped: Any, completed: bool, message: str, told: list[str]
) -> None:
    said: list[str] = []

    def reaper_of(state: Path, store: str | None, log: Any, forget: Any) -> Any:
        def do() -> list[Reaped]:
            if isinstance(reaped, StorageError):
                raise reaped
            for one in reaped:
                if not one.failed:
                    forget(one.run)
            return reaped

        return None if reaped is None else SimpleNamespace(reap=do)

    monkeypatch.setattr(reap, "reaper_of", reaper_of)
    monkeypatch.setattr(reap, "told", lambda what, *_: said.append(what))
    monkeypatch.setattr(reap, "get_client", lambda **_: contextlib.nullcontext())
    with disable_run_logger():
        state = reap.areal_reap.fn()
    assert (state.is_completed(), state.message, said) == (completed, message, told)
