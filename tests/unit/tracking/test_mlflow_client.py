"""Runs that are opened, taken up again, added to and ended, in an MLflow on SQLite.

Against a server: tests/integration/test_tracking.py.
"""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from areal_core.errors import TrackingError
from areal_core.tracking.mlflow_client import add_to_run, check_reachable, end_run, experiment_of, resume_run, start_run


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "/tmp/mlruns", "ftp://host", ""])
def test_file_store_and_unknown_schemes_are_refused(uri: str) -> None:
    with pytest.raises(TrackingError, match=r"^tracking\.uri: .* is not supported; use http"):
        check_reachable(uri)


def test_run_is_opened_added_to_and_ended(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # of somebody else
    run_id = start_run(uri, "areal", "first", {"comparison": "first"}, {"arms": {"sync": "mode=sync"}})
    page = tmp_path / "report.html"
    page.write_text("<p>")
    add_to_run(uri, run_id, metrics={"comparison/a.low": 1.5}, step=6, files=[page], folder="report")
    end_run(uri, run_id, "FAILED")

    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FAILED")
    assert run.data.tags["comparison"] == "first"
    assert run.data.params == {"arms.sync": "mode=sync"}
    assert [(point.step, point.value) for point in client.get_metric_history(run_id, "comparison/a.low")] == [(6, 1.5)]
    assert [file.path for file in client.list_artifacts(run_id, "report")] == ["report/report.html"]
    assert experiment_of(uri, run_id) == client.get_experiment_by_name("areal").experiment_id  # type: ignore[union-attr]


@pytest.mark.parametrize("note", [None, "ours"])
def test_experiment_opens_on_its_table_of_runs(tmp_path: Path, note: str | None) -> None:
    """Also one that was made before; the columns must be what runs have, and what somebody wrote of it stays."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    if note is not None:
        client.create_experiment("areal", str(tmp_path), {"mlflow.note.content": note})
    experiment = client.get_experiment(experiment_of(uri, start_run(uri, "areal", "x", {}, {})))
    table = f"#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=areal"
    described = experiment.tags["mlflow.note.content"]
    assert described == note or f"]({table})" in described
    view = json.loads(experiment.tags["mlflow.sharedViewState.areal"])
    assert view.keys() == {"name", "createdAt", "state"}
    columns = json.loads(view["state"])["selectedColumns"]
    assert columns[:3] == ["tags.`mode`", "tags.`eta`", "metrics.`heldout/accuracy`"]
    documented = Path("docs/metrics.md").read_text()
    assert all(column.removeprefix("metrics.") in documented for column in columns[2:])


def test_run_is_taken_up_again_unless_it_is_gone(uri: str) -> None:
    run_id = start_run(uri, "areal", "again", {}, {})
    end_run(uri, run_id, "KILLED")
    assert resume_run(uri, run_id, {}, {})
    assert MlflowClient(uri).get_run(run_id).info.status == "RUNNING"
    MlflowClient(uri).delete_run(run_id)
    assert not resume_run(uri, run_id, {}, {})
    assert not resume_run(uri, "0" * 32, {}, {})
    with pytest.raises(TrackingError, match=r"^tracking\.uri: can't use MLflow at sqlite:.*: .*not found") as caught:
        end_run(uri, "0" * 32, "FINISHED")
    assert "\n" not in str(caught.value)
