"""The flows `areal-compare` and `areal-reap`: which failures are tried again, and what is said at the end."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.logging import disable_run_logger
from prefect.states import Failed

from areal_core.errors import ConfigError, DivergenceError, ProcessError, StorageError
from flows import compare, page, reap
from flows.compare import _should_retry
from flows.provision.reaper import ReapResult


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ProcessError("trainer-0 was killed"), True),
        (DivergenceError("loss nan"), False),
        (ConfigError("seed: no"), False),
        (KeyError("a bug"), False),
    ],
)
@pytest.mark.parametrize("returned", [True, False])
def test_only_what_may_end_otherwise_is_tried_again(error: Exception, again: bool, returned: bool) -> None:
    state: Any = Failed(data=Failed(message=str(error), data=error) if returned else error)  # as Prefect wraps them
    task: Any = compare.trial
    assert _should_retry(task, TaskRun.model_construct(run_count=2), state) == again
    assert task.retries == 1


ENDED = ReapResult(run="first", ended="1 aws_instance", cost="$1.00")
FAILED = ReapResult(run="second", failed="no rights")


@pytest.mark.parametrize(
    ("reaped", "completed", "message", "told"),
    [
        (None, True, reap.NOTHING_KNOWN, []),
        ([], True, "nothing to destroy", []),
        ([ENDED], True, "first", ["delete the work queues of run first", "store the table of destroyed nodes"]),
        (
            [FAILED],
            False,
            "run second: deleted nothing; failed, the next reaper retries: no rights",
            ["store the table of destroyed nodes"],
        ),
        (StorageError("storage.url: can't list s3://b"), False, "storage.url: can't list s3://b", []),
    ],
)
def test_flow_ends_with_what_the_reaper_has_done(
    monkeypatch: pytest.MonkeyPatch, reaped: Any, completed: bool, message: str, told: list[str]
) -> None:
    said: list[str] = []

    def reaper_of(state: Path, store: str | None, log: Any, forget: Any) -> Any:
        def do() -> list[ReapResult]:
            if isinstance(reaped, StorageError):
                raise reaped
            for one in reaped:
                if not one.failed:
                    forget(one.run)
            return reaped

        return None if reaped is None else SimpleNamespace(reap=do)

    monkeypatch.setattr(reap, "reaper_of", reaper_of)
    for module in (reap, page):
        monkeypatch.setattr(module, "retry", lambda what, *_: said.append(what))
    monkeypatch.setattr(reap, "get_client", lambda **_: contextlib.nullcontext())
    with disable_run_logger():
        state = reap.areal_reap.fn()
    assert (state.is_completed(), state.message, said) == (completed, message, told)
