"""A trial's result is what its run left in its folder; the comparison's own run in MLflow is opened once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from areal_core.config.schema import RunConfig
from areal_core.errors import ProcessError
from areal_core.run.launcher import read_summary, run_folder
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.tracking.outbox import Outbox
from areal_core.types import MetricRow, RunSummary
from flows.comparison.design import Comparison, Trial, plan_trials
from flows.comparison.parent import Parent, open_parent
from flows.comparison.trials import TrialResult, load_result, run_trial
from tests.support.comparison import made_up

_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}


class Runs:
    """In place of `areal_core.run.launcher.execute`: leaves what a run leaves, or fails."""

    def __init__(self, trials: list[Trial], failing: Mapping[str, str] | None = None) -> None:
        self._made_up = {trial.run_id: made_up(trial).summary for trial in trials}
        self._failing = failing or {}
        self.calls: list[tuple[str, Mapping[str, str]]] = []

    def __call__(self, config: RunConfig, *, run_id: str, tags: Mapping[str, str], **options: Any) -> RunSummary:
        self.calls.append((run_id, tags))
        run = RunDir.create(config, RunInfo(run_id=run_id, model_path="m", checkpoint_url="c"))
        with contextlib.closing(Outbox(run.outbox, run_id)) as outbox:
            outbox.log([MetricRow(key="reward/mean", step=step, value=0.1 * step, time_s=1.0) for step in (2, 1)])
        if reason := self._failing.get(run_id):
            raise ProcessError(reason)
        summary = self._made_up[run_id]
        assert summary is not None
        write_json(run.summary, dataclasses.asdict(summary))
        return read_summary(run)


def _trials(state: Path) -> list[Trial]:
    return plan_trials("t", "cpu-async", _ARMS, [1, 2], [f"state_dir={state}"])


def test_result_is_what_the_run_left(tmp_path: Path) -> None:
    trials = _trials(tmp_path)
    runs = Runs(trials)
    result = run_trial(trials[0], tags={"comparison": "t"}, log=print, execute=runs)
    assert runs.calls == [("t.sync.s1", {"arm": "sync", "comparison": "t"})]
    assert result.failure is None
    assert result.summary is not None
    assert result.summary.run_id == "t.sync.s1"
    assert result.curves == {"reward/mean": [(1, 0.1), (2, 0.2)]}
    assert load_result(trials[0]) == result


def test_failed_trial_is_a_result_and_the_next_one_runs(tmp_path: Path) -> None:
    trials = _trials(tmp_path)
    runs = Runs(trials, failing={"t.async-1.s1": "trainer-0 exited\nwith code 3"})
    results = [run_trial(trial, log=print, execute=runs) for trial in trials]
    assert [run_id for run_id, _ in runs.calls] == ["t.sync.s1", "t.async-1.s1", "t.async-1.s2", "t.sync.s2"]
    failed = results[1]
    assert failed.failure == "trainer-0 exited with code 3"
    assert failed.summary is None
    assert failed.curves["reward/mean"] == [(1, 0.1), (2, 0.2)]  # as far as it came
    assert [result.summary is not None for result in results] == [True, False, True, True]


def test_run_that_can_not_start_is_a_failed_trial(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    trial = _trials(tmp_path / "file" / "state")[0]
    result = run_trial(trial, log=print)  # the real thing
    assert result.summary is None
    assert result.failure is not None
    assert result.failure.startswith("state_dir: can't write to ")
    assert result.curves == {}


def test_finished_run_must_be_what_is_planned(tmp_path: Path) -> None:
    [made, *_] = _trials(tmp_path)
    assert load_result(made).failure == "the run has not ended: it left no summary"
    assert not run_folder(made.config, "t.sync.s1").root.exists()  # a look leaves nothing behind
    run_trial(made, log=print, execute=Runs([made]))

    def found(*overrides: str) -> TrialResult:
        return load_result(plan_trials("t", "cpu-async", _ARMS, [1], [f"state_dir={tmp_path}", *overrides])[0])

    other = found("stop.minutes=3")
    assert other.failure == "stop.minutes: must be 3.0 as planned, got None from the finished run t.sync.s1"
    assert other.summary is None
    assert found("storage.url=/elsewhere", "tracking=off").summary is not None


def _open(folder: Path, seeds: Sequence[int] = (1, 2), *overrides: str) -> Parent | None:
    every = [f"state_dir={folder}", *overrides]
    comparison = Comparison(name="study", experiment="cpu-async", arms=_ARMS, seeds=seeds, overrides=every)
    comparison.write()
    return open_parent(comparison, comparison.trials(), {"areal.flow_run_id": "f"})


def _remembered(folder: Path) -> Path:
    return folder / "comparisons" / "study" / "tracking.json"


@pytest.fixture(autouse=True)
def _sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_parent_is_opened_once_and_found_again_with_what_was_added(tmp_path: Path) -> None:
    parent = _open(tmp_path)
    assert parent is not None
    assert parent.places([]) == {"MLflow": parent.uri}  # a database has no pages
    parent.add({"comparison/async-1.wall_time.ratio": 0.5}, 4, [_remembered(tmp_path)])
    parent.end("KILLED")
    assert _open(tmp_path, [1, 2, 3]) == parent

    client = MlflowClient(parent.uri)
    run = client.get_run(parent.run_id)
    assert (run.info.run_name, run.info.status) == ("study", "RUNNING")
    tags = {"comparison": "study", "experiment": "cpu-async", "areal.flow_run_id": "f"}
    assert run.data.tags.items() >= (tags | {"seeds": "1, 2, 3", "arms": "sync, async-1"}).items()
    assert [file.path for file in client.list_artifacts(parent.run_id, "report")] == ["report/tracking.json"]
    kept = json.loads(Path(client.download_artifacts(parent.run_id, "config.json", str(tmp_path))).read_text())
    assert kept["seeds"] == "1, 2, 3"
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_untracked_comparison_has_no_parent(tmp_path: Path) -> None:
    assert _open(tmp_path, [1], "tracking=off") is None
    assert not _remembered(tmp_path).exists()
