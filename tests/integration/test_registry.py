"""Registered models in a real MLflow: one version a run, and the alias of the best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from areal_core.tracking.mlflow_client import register, start_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def model(run: str, accuracy: float, held_out: str = "a", name: str = "areal-m") -> dict[str, Any]:
    url = f"s3://bucket/runs/{run}/best"
    return {"name": name, "url": url, "run": run, "version": 5, "accuracy": accuracy, "held_out": held_out}


def test_the_best_version_of_comparable_runs_has_the_alias(uri: str) -> None:
    client = MlflowClient(uri)
    runs = {name: start_run(uri, "e", name, {}, {}) for name in ("first", "worse", "better", "other")}

    def registered(name: str, accuracy: float, held_out: str = "a") -> str:
        register(client, runs[name], model(name, accuracy, held_out))
        register(client, runs[name], model(name, accuracy, held_out))  # again, as after a failure
        return client.get_model_version_by_alias("areal-m", "best").run_id

    assert registered("first", 0.5) == runs["first"]
    assert registered("worse", 0.4) == runs["first"]
    assert registered("better", 0.6) == runs["better"]
    assert registered("other", 0.1, held_out="b") == runs["other"]  # other prompts: nothing to compare with
    versions = client.search_model_versions("name='areal-m'")
    assert sorted(version.run_id for version in versions) == sorted(runs.values())
    (first,) = [version for version in versions if version.run_id == runs["first"]]
    assert first.source == "s3://bucket/runs/first/best"
    assert first.tags["areal.version"] == "5"
    assert "held-out accuracy 0.500" in first.description


def test_a_model_in_a_folder_is_named_by_a_tag(uri: str, tmp_path: Path) -> None:
    client, run_id = MlflowClient(uri), start_run(uri, "e", "local", {}, {})
    register(client, run_id, {**model("local", 0.5, name="areal-local"), "url": str(tmp_path)})
    (version,) = client.search_model_versions("name='areal-local'")
    assert (version.source, version.tags["areal.url"]) == (f"runs:/{run_id}/summary.json", str(tmp_path))
