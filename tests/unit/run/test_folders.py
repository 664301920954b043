"""The folders of runs and the place of MLflow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.schema import load
from areal_core.errors import ConfigError
from areal_core.run.folders import run_folder, tracking_uri
from tests.support.runs import changed


def test_run_folder_and_tracking_uri(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder(dataclasses.replace(load(base), state_dir="here"), "r").root == tmp_path / "here" / "runs" / "r"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    on = changed(base, tracking={"enabled": True})
    assert tracking_uri(load(base)) is None
    assert tracking_uri(on) == f"sqlite:///{base['state_dir']}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker")
    assert tracking_uri(on) == "http://tracker"
    assert tracking_uri(changed(base, tracking={"enabled": True, "uri": "http://mine"})) == "http://mine"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@tracker")
    with pytest.raises(ConfigError, match=r"^MLFLOW_TRACKING_URI: must hold no user or password; ") as refused:
        tracking_uri(on)
    assert "hunter2" not in str(refused.value)
