"""The flows `areal-compare` and `areal-reap`: which failures are tried again, and what is said at the end."""

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.logging import disable_run_logger
from prefect.states import Failed

from areal_core.errors import ConfigError, DivergenceError, ProcessError, StorageError, TrackingError
from flows import compare, reap
from flows.compare import _worth_another_try, track
from flows.comparison.design import DEFAULT_ARMS, Comparison
from flows.provision.reaper import Reaped


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ProcessError("trainer-0 was killed"), True),
        (TrackingError("gone"), False),  # the trial has waited for MLflow itself
        (DivergenceError("loss nan"), False),
        (ConfigError("seed: no"), False),
        (KeyError("a bug"), False),
    ],
)
@pytest.mark.parametrize("returned", [True, False])
def test_only_what_may_end_otherwise_is_tried_again(error: Exception, again: bool, returned: bool) -> None:
    state: Any = Failed(data=Failed(message=str(error), data=error) if returned else error)  # as Prefect wraps them
    task: Any = compare.trial
    assert _worth_another_try(task, TaskRun.model_construct(run_count=2), state) == again
    assert task.retries == 1


@pytest.mark.parametrize(("away", "tries"), [(1, 2), (99, 5)])
def test_waiting_for_mlflow_costs_a_trial_no_retry(monkeypatch: pytest.MonkeyPatch, away: int, tries: int) -> None:
    gone, failed = TrackingError("gone"), ProcessError("trainer-0 was killed")
    errors = [gone] * away + [failed]
    run_trial = MagicMock(side_effect=[SimpleNamespace(error=error, failure=str(error)) for error in errors])
    for name, value in {"run_trial": run_trial, "_has_ended": lambda _: False, "_MLFLOW_DELAY_S": 0.0}.items():
        monkeypatch.setattr(compare, name, value)
    progress: Any = MagicMock()
    with disable_run_logger():
        state = compare.trial.fn(MagicMock(), {}, progress)
    assert state.data is (gone if tries <= away else failed)
    assert run_trial.call_count == tries
    assert [call.args for call in progress.note.call_args_list] == [("waiting for MLflow",)] * (tries - 1)


@pytest.mark.parametrize("done", [True, False])
def test_report_alone_needs_no_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    away = [f"state_dir={tmp_path}", "tracking.uri=http://127.0.0.1:9"]
    comparison = Comparison(name="s", experiment="cpu-async", arms=DEFAULT_ARMS, seeds=[1], overrides=away)
    trials = comparison.trials()
    (tmp_path / "comparisons" / "s").mkdir(parents=True)
    (tmp_path / "comparisons" / "s" / "tracking.json").write_text('{"run_id": "0123"}')
    for trial in trials[: None if done else -1]:
        folder = tmp_path / "runs" / trial.run_id
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
    monkeypatch.setattr(compare, "get_run_logger", lambda: logging.getLogger("test"))
    if done:
        assert track.fn(comparison, trials) is None
    else:
        with pytest.raises(TrackingError):
            track.fn(comparison, trials)


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
