"""The run of a comparison in MLflow, on SQLite: opened once, found again, and parent of its trials."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.comparison.design import Comparison
from flows.comparison.parent import Parent, open_parent

_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}


def _comparison(folder: Path, overrides: Sequence[str] = (), seeds: Sequence[int] = (1, 2)) -> Comparison:
    overrides = [f"state_dir={folder}", *overrides]
    return Comparison(name="study", experiment="cpu-async", arms=_ARMS, seeds=seeds, overrides=overrides)


def _open(folder: Path, overrides: Sequence[str] = (), seeds: Sequence[int] = (1, 2)) -> Parent | None:
    comparison = _comparison(folder, overrides, seeds)
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
    assert _open(tmp_path, seeds=[1, 2, 3]) == parent

    client = MlflowClient(parent.uri)
    run = client.get_run(parent.run_id)
    assert (run.info.run_name, run.info.status) == ("study", "RUNNING")
    tags = {"comparison": "study", "experiment": "cpu-async", "areal.flow_run_id": "f"}
    assert run.data.tags.items() >= (tags | {"seeds": "1, 2, 3", "arms": "sync, async-1"}).items()
    assert run.data.params["arms.async-1"] == "mode=async rollout.max_staleness=1"
    assert [file.path for file in client.list_artifacts(parent.run_id, "report")] == ["report/tracking.json"]
    kept = json.loads(Path(client.download_artifacts(parent.run_id, "config.json", str(tmp_path))).read_text())
    assert kept["seeds"] == "1, 2, 3"
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_parent_that_is_gone_is_opened_anew(tmp_path: Path) -> None:
    _remembered(tmp_path).parent.mkdir(parents=True)
    _remembered(tmp_path).write_text(json.dumps({"uri": "http://127.0.0.1:1", "run_id": "0" * 32}))
    parent = _open(tmp_path)
    assert parent is not None
    assert parent.run_id != "0" * 32
    assert json.loads(_remembered(tmp_path).read_text())["run_id"] == parent.run_id


def test_untracked_comparison_has_no_parent(tmp_path: Path) -> None:
    assert _open(tmp_path, ["tracking=off"]) is None
    assert not _remembered(tmp_path).exists()
