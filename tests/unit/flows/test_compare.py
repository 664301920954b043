"""The form of the flow's parameters as Prefect shows it, which failures are tried again, and what is said of them."""

import logging
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from areal_core.errors import ConfigError, DivergenceError, ProcessError, TrackingError
from areal_core.types import RunSummary
from flows import compare
from flows.compare import _with_mlflow, _worth_another_try, track
from flows.comparison.design import DEFAULT_ARMS, plan_trials
from flows.comparison.record import Comparison
from flows.comparison.trials import run_trial


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ProcessError("trainer-0 was killed"), True),
        (DivergenceError("loss nan"), False),
        (TrackingError("gone"), False),  # it has been waited for
        (ConfigError("seed: no"), False),
        (KeyError("a bug"), False),
    ],
)
def test_only_what_may_end_otherwise_is_tried_again(error: Exception, again: bool) -> None:
    task_run = TaskRun.model_construct()
    returned = Failed(data=Failed(message=str(error), data=error))  # as Prefect wraps what a task returns
    raised = Failed(data=error)
    assert _worth_another_try(None, task_run, returned) is again  # type: ignore[arg-type]
    assert _worth_another_try(None, task_run, raised) is again  # type: ignore[arg-type]


class _Away:
    """A run that can't start: MLflow is away for so many attempts, and then something else is wrong."""

    def __init__(self, attempts: int) -> None:
        self._away = attempts
        self.attempts = 0

    def __call__(self, *_: Any, **__: Any) -> RunSummary:
        self.attempts += 1
        raise TrackingError("gone") if self.attempts <= self._away else ProcessError("trainer-0 was killed")


class _Said:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, what: str) -> None:
        self.notes.append(what)

    def show(self, status: object) -> None: ...


@pytest.mark.parametrize(("away", "attempts", "failure"), [(0, 1, "trainer"), (3, 4, "trainer"), (99, 5, "gone")])
def test_mlflow_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int, attempts: int, failure: str
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(compare, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(compare.time, "sleep", waits.append)
    trial = plan_trials("s", "cpu-async", DEFAULT_ARMS, [1], [f"state_dir={tmp_path}"])[0]
    execute, said = _Away(away), _Said()
    monkeypatch.setattr(compare, "run_trial", partial(run_trial, execute=execute))
    result = _with_mlflow(trial, {}, cast(Any, said))
    assert execute.attempts == attempts
    assert waits == [30.0] * (attempts - 1)
    assert said.notes == ["waiting for MLflow"] * (attempts - 1)
    assert str(result.failure).startswith(failure)


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
