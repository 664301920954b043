"""Comparisons on a real Prefect server and a real MLflow: complete, continued, with a failing arm, and cancelled; and
`make evaluate` there: scores, a page, a table, a data set."""

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
from tests.support.models import write_tiny
from tests.support.stack import Up

pytestmark = pytest.mark.slow

DEPLOYMENT = "areal-compare/compare"
_ARMS = ("--arm", "sync: mode=sync", "--arm", "async-1: mode=async rollout.max_staleness=1")
_FAILING = ("--arm", "late: mode=async launch.start_timeout_s=0.1")


@pytest.fixture(scope="module")
def first(up: Up) -> subprocess.CompletedProcess[str]:
    """`areal compare --name first seed=1 ...`."""
    return _compare(up.state, "--name", "first", "seed=1", *_ARMS, *_small(up.state))


def _small(state: Path) -> list[str]:
    return ["training.steps=2", "launch.devices=1", *tiny(state)]


def _compare(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(state, "flows.cli", "compare", *arguments)


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


def test_comparison_leaves_a_report_artifacts_and_runs(up: Up, first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0, first.stdout + first.stderr
    parent, flow_run = _parent(up, "first"), up.newest()
    its, run_id = f"experiments/{parent.info.experiment_id}/runs/{parent.info.run_id}?", parent.info.run_id
    for said in (
        *("Comparison first\n", "first: trial 2 of 2: async-1 seed 1", "curves over time: "),
        *(f"report: {up.state / 'comparisons' / 'first' / 'report.md'}", f"MLflow: {up.told['mlflow_uri']}/#/{its}"),
    ):
        assert said in first.stdout
    artifacts = {key: artifact.data for key, artifact in up.artifacts(flow_run.id).items()}
    assert {"areal-progress", "areal-places"} <= artifacts.keys()
    assert "## Results" in artifacts["areal-comparison"]
    assert [row["arm"] for row in json.loads(artifacts["areal-result"])] == ["sync", "async-1"]
    states = {name: run.state_name for name, run in _trials(up, flow_run).items()}
    assert states == {"sync seed 1": "Completed", "async-1 seed 1": "Completed"}
    assert (parent.info.status, parent.data.tags["comparison"]) == ("FINISHED", "first")
    assert parent.data.metrics["comparison/async-1.effective_tokens_per_s.ratio"] > 0
    paths = MlflowClient(up.told["mlflow_uri"]).list_artifacts(run_id, "report")
    assert {"report/report.md", "report/plan.json"} <= {file.path for file in paths}
    children = _children(up, parent)
    labels = {
        name: [run.data.tags[tag] for tag in ("arm", "mode", "eta", "seed", "comparison")]
        for name, run in children.items()
    }
    assert labels == {
        "first.sync.s1": ["sync", "sync", "0", "1", "first"],
        "first.async-1.s1": ["async-1", "async", "1", "1", "first"],
    }
    for run in children.values():
        assert {"time/elapsed_s", "heldout/accuracy", "final/accuracy_after"} <= run.data.metrics.keys()


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
    assert "1 of 3 trials failed: late seed 1: " in again.stdout.splitlines()[-1]
    flow_run = up.newest()
    assert flow_run.state_name == "Failed"
    table = json.loads(up.artifacts(flow_run.id)["areal-result"].data)
    assert {row["arm"]: row["succeeded"] for row in table} == {"sync": "1 of 1", "async-1": "1 of 1", "late": "0 of 1"}
    trials = _trials(up, flow_run)
    for arm in ("sync", "async-1"):
        assert trials[f"{arm} seed 1"].state.message == "finished before, not repeated"
    assert (trials["late seed 1"].state_name, trials["late seed 1"].run_count) == ("Failed", 2)
    assert summary.stat().st_mtime_ns == written
    parent = _parent(up, "first")
    assert (parent.info.run_id, parent.info.status) == (before.info.run_id, "FAILED")
    assert set(_children(up, parent)) == {"first.sync.s1", "first.async-1.s1", "first.late.s1"}
    assert "late, seed 1: " in (up.state / "comparisons" / "first" / "report.md").read_text()


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
    up.until("its processes end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    up.until("the comparison's run is killed", lambda: _parent(up, name).info.status == "KILLED")
    up.until(
        "its trial's run is, too",
        lambda: {run.info.status for run in _children(up, _parent(up, name)).values()} == {"KILLED"},
    )


def _evaluate(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = (f"state_dir={state}", f"storage.url={state}/storage", "generation.slots=8", "launch.devices=1")
    limits = ("task.held_out=12", "task.max_new_tokens=16")
    return run_python(state, "flows.cli", "evaluate", *arguments, *settings, *limits)


@pytest.fixture(scope="module")
def model(up: Up) -> str:
    return str(write_tiny(up.state / "tiny-model"))


def test_an_evaluation_is_shown_and_tracked(up: Up, model: str) -> None:
    asked = (model, "--benchmark", "arithmetic", "evaluation.samples=2", "--name", "before")
    done = _evaluate(up.state, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    page = up.state / "evaluations" / "before" / "arithmetic.html"
    assert f"arithmetic, page: {page}" in done.stdout
    assert page.exists()
    artifacts = up.artifacts(up.newest().id)
    rows = json.loads(artifacts["areal-result"].data)
    assert {row["figure"] for row in rows} == {
        *("problems", "greedy", "pass@1, 2 samples", "pass@2, 2 samples", "completions"),
    }
    client = MlflowClient(up.told["mlflow_uri"])
    [experiment] = client.search_experiments(filter_string="name = 'areal'")
    [run] = client.search_runs([experiment.experiment_id], "tags.evaluation = 'before'")
    assert (
        f"tracking: {up.told['mlflow_uri']}/#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}?"
        in done.stdout
    )
    assert run.info.status == "FINISHED"
    assert 0 <= run.data.metrics["eval/arithmetic/greedy_low"] <= run.data.metrics["eval/arithmetic/greedy_high"] <= 1
    [data] = run.inputs.dataset_inputs
    assert (data.dataset.name, data.tags[0].value) == ("arithmetic", "evaluation")
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "evaluation/arithmetic.json")).read_text())
    assert len(table["data"]) == 12
    assert {"prompt", "greedy", "verdict", "samples correct"} <= set(table["columns"])
