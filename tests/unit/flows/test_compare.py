"""The form of the flow's parameters as Prefect shows it, which failures are tried again, and what is said of them."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from areal_core.errors import ConfigError, DivergenceError, ProcessError, TrackingError
from flows import compare
from flows.compare import _worth_another_try, track
from flows.comparison.design import DEFAULT_ARMS, Comparison


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ProcessError("trainer-0 was killed"), 2),
        (TrackingError("gone"), 6),  # MLflow is waited for
        (DivergenceError("loss nan"), 1),
        (ConfigError("seed: no"), 1),
        (KeyError("a bug"), 1),
    ],
)
@pytest.mark.parametrize("returned", [True, False])
def test_only_what_may_end_otherwise_is_tried_again(error: Exception, tries: int, returned: bool) -> None:
    state: Any = Failed(data=Failed(message=str(error), data=error) if returned else error)  # as Prefect wraps them
    task: Any = compare.trial
    again = [_worth_another_try(task, TaskRun.model_construct(run_count=count), state) for count in range(1, 6)]
    assert again == [count < tries for count in range(1, 6)]
    assert compare.trial.retries == 5


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
