"""`make evaluate` on a real Prefect server and a real MLflow: scores, a page, a table, a data set; a wrong setting."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support.control import run_python
from tests.support.models import write_tiny
from tests.support.stack import Up

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end]


def _evaluate(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = (f"state_dir={state}", f"storage.url={state}/storage", "generation.slots=8", "launch.devices=1")
    limits = ("task.held_out=12", "task.max_new_tokens=16")
    return run_python(state, "flows.evaluate_command", *arguments, *settings, *limits)


@pytest.fixture(scope="module")
def model(up: Up) -> str:
    return str(write_tiny(up.state / "tiny-model"))


def test_an_evaluation_is_shown_and_tracked(up: Up, model: str) -> None:
    asked = ("--model", model, "--benchmarks", "arithmetic", "--samples", "2", "--name", "before")
    done = _evaluate(up.state, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    page = up.state / "evaluations" / "before" / "arithmetic.html"
    assert f"arithmetic, to read: {page}" in done.stdout
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


def test_what_is_wrong_is_one_line_before_anything_starts(up: Up) -> None:
    done = _evaluate(up.state, "--model", "m", "--benchmarks", "arithmetics")
    assert done.returncode == 2
    assert done.stderr.startswith("areal: error: task: ")
    assert done.stderr.count("\n") == 1
