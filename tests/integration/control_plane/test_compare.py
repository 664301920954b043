"""Comparisons on a real Prefect server and a real MLflow: complete, continued, with a failing arm, and cancelled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.states import Cancelling

from tests.support.control import emulated, run_python, tiny
from tests.support.stack import Up

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]

DEPLOYMENT = "areal-compare/compare"
_ARMS = ("--arm", "sync: mode=sync", "--arm", "async-1: mode=async rollout.max_staleness=1")
_FAILING = ("--arm", "late: mode=async launch.start_timeout_s=0.1")


@pytest.fixture(scope="module")
def first(up: Up) -> subprocess.CompletedProcess[str]:
    """`make compare NAME=first SEEDS=1 ...`."""
    return _compare(up.state, "--name", "first", "--seeds", "1", *_ARMS, *_small(up.state))


def _small(state: Path) -> list[str]:
    return ["training.steps=2", "launch.devices=1", *tiny(state)]


def _compare(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(state, "flows.compare_command", *arguments)


def _trials(up: Up, flow_run: FlowRun) -> dict[str, TaskRun]:
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    return {run.name: run for run in up.client.read_task_runs(flow_run_filter=chosen) if " seed " in run.name}


def _parent(up: Up, name: str) -> Run:
    known = json.loads((up.state / "comparisons" / name / "tracking.json").read_text())
    return MlflowClient(up.told["mlflow_uri"]).get_run(known["run_id"])


def _children(up: Up, parent: Run) -> dict[str, Run]:
    chosen = f"tags.mlflow.parentRunId = '{parent.info.run_id}'"
    found = MlflowClient(up.told["mlflow_uri"]).search_runs([parent.info.experiment_id], chosen)
    return {str(run.info.run_name): run for run in found}


def test_comparison_completes_and_says_where_its_report_is(up: Up, first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0, first.stdout + first.stderr
    folder = up.state / "comparisons" / "first"
    assert f"report: {folder / 'report.md'}" in first.stdout
    its = _parent(up, "first").info
    assert f"MLflow: {up.told['mlflow_uri']}/#/experiments/{its.experiment_id}/runs/{its.run_id}?" in first.stdout
    assert "curves over time: " in first.stdout
    assert "ratio or difference to sync" in " ".join(first.stdout.split())
    assert first.stdout.startswith("Comparison first\n")
    assert "first: trial 2 of 2: async-1 seed 1" in first.stdout


def test_comparison_leaves_artifacts_and_a_task_a_trial(up: Up, first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0
    flow_run = up.newest()
    artifacts = up.artifacts(flow_run.id)
    assert {"areal-progress", "areal-result", "areal-places", "areal-comparison"} <= set(artifacts)
    assert _parent(up, "first").info.run_id in artifacts["areal-mlflow"].data
    assert "viewStateShareKey=areal" in artifacts["areal-table-of-runs"].data
    assert "x_axis=relative" in artifacts["areal-curves-over-time"].data
    assert "x_axis=step" in artifacts["areal-curves-over-steps"].data
    assert [row["arm"] for row in json.loads(artifacts["areal-result"].data)] == ["sync", "async-1"]
    assert artifacts["areal-comparison"].data.startswith("# Comparison first")
    assert "](data:image/png;base64," in artifacts["areal-comparison"].data
    assert {name: run.state_name for name, run in _trials(up, flow_run).items()} == {
        "sync seed 1": "Completed",
        "async-1 seed 1": "Completed",
    }


def test_trials_are_children_of_the_comparison_in_mlflow(up: Up, first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0
    parent = _parent(up, "first")
    assert (parent.info.run_name, parent.info.status) == ("first", "FINISHED")
    assert parent.data.tags["comparison"] == "first"
    assert parent.data.metrics["comparison/async-1.effective_tokens_per_s.ratio"] > 0
    paths = MlflowClient(up.told["mlflow_uri"]).list_artifacts(parent.info.run_id, "report")
    assert {"report/report.md", "report/learning-curves.png", "report/plan.json"} <= {file.path for file in paths}
    children = _children(up, parent)
    assert set(children) == {"first.sync.s1", "first.async-1.s1"}
    labels = [[run.data.tags[tag] for tag in ("arm", "mode", "eta", "seed", "comparison")] for run in children.values()]
    assert sorted(labels) == [["async-1", "async", "1", "1", "first"], ["sync", "sync", "0", "1", "first"]]
    keys = [set(run.data.metrics) for run in children.values()]
    assert {"time/elapsed_s", "ledger/consumed_tokens", "heldout/accuracy", "final/accuracy_after"} <= keys[0] & keys[1]


def test_curves_over_time_show_the_speeds_of_the_report(up: Up, first: subprocess.CompletedProcess[str]) -> None:
    """From a run's start, the score of version 0, to that of its last version, the curves take the wall time that the
    report compares."""
    assert first.returncode == 0
    client = MlflowClient(up.told["mlflow_uri"])
    curves, reported = {}, {}
    for name, run in _children(up, _parent(up, "first")).items():
        scores = client.get_metric_history(run.info.run_id, "heldout/accuracy")
        at = {score.step: score.timestamp / 1000 for score in scores}
        curves[name] = at[max(at)] - at[0]
        reported[name] = json.loads((up.state / "runs" / name / "summary.json").read_text())["rl_wall_s"]
    sync, other = "first.sync.s1", "first.async-1.s1"
    assert curves[sync] / curves[other] == pytest.approx(reported[sync] / reported[other], rel=0.02)


@pytest.mark.nightly
def test_continued_comparison_runs_only_what_is_new_and_survives_a_failing_arm(
    up: Up, first: subprocess.CompletedProcess[str]
) -> None:
    assert first.returncode == 0
    before = _parent(up, "first")
    summary = up.state / "runs" / "first.sync.s1" / "summary.json"
    written = summary.stat().st_mtime_ns
    again = _compare(up.state, "--name", "first", *_FAILING, *_small(up.state))
    assert again.returncode == 1, again.stdout + again.stderr
    failure = "1 of 3 trials failed: late seed 1: "
    assert failure in again.stdout.splitlines()[-1]
    assert "not ready within 0.1 s" in again.stdout
    flow_run = up.newest()
    assert flow_run.state is not None
    assert flow_run.state.name == "Failed"
    assert str(flow_run.state.message).startswith(failure)
    table = json.loads(up.artifacts(flow_run.id)["areal-result"].data)
    assert {row["arm"]: row["succeeded"] for row in table} == {"sync": "1 of 1", "async-1": "1 of 1", "late": "0 of 1"}
    trials = _trials(up, flow_run)
    states = {name: run.state for name, run in trials.items()}
    assert {name: state.message for name, state in states.items() if state and state.is_completed()} == {
        "sync seed 1": "has ended before, not run again",
        "async-1 seed 1": "has ended before, not run again",
    }
    assert (trials["late seed 1"].state_name, trials["late seed 1"].run_count) == ("Failed", 2)
    assert summary.stat().st_mtime_ns == written
    parent = _parent(up, "first")
    assert (parent.info.run_id, parent.info.status) == (before.info.run_id, "FAILED")
    assert set(_children(up, parent)) == {"first.sync.s1", "first.async-1.s1", "first.late.s1"}
    report = (up.state / "comparisons" / "first" / "report.md").read_text()
    assert "late, seed 1: " in report


@pytest.mark.recovery
def test_cancelled_comparison_ends_its_trial_and_can_go_on(up: Up) -> None:
    settings = {"seeds": [1], "overrides": ["training.steps=10000", *emulated(up.state, tracked=True)]}
    flow_run_id = up.start(DEPLOYMENT, arms={"sync": ["mode=sync"], "other": ["mode=async"]}, **settings)
    up.wait(flow_run_id, "Running")
    name = f"cpu-async-{str(flow_run_id)[-12:]}"
    pids = up.roles_of(f"{name}.sync.s1")
    up.client.set_flow_run_state(flow_run_id, Cancelling())
    up.wait(flow_run_id, "Cancelled")
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    up.until("the comparison's run is killed", lambda: _parent(up, name).info.status == "KILLED")
    children = _children(up, _parent(up, name))
    assert [run.info.status for run in children.values()] == ["KILLED"]
