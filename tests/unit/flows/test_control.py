"""What the control plane's machine is told, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from flows import control


def told(state: Path) -> control.Control:
    return control.Control(
        address="127.0.0.1",
        state=str(state),
        artifacts="s3://bucket/mlflow",
        region="us-east-1",
        prefect_secret="/areal/prefect",
        mlflow_secret="/areal/mlflow",
    )


def test_a_password_that_mlflow_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "secret_values", lambda *_: {"prefect": "a:b", "mlflow": "planted"})
    with pytest.raises(ConfigError, match=r"^/areal/mlflow: must have 12 characters at least$"):
        control.serve(told(tmp_path))
    assert list(tmp_path.iterdir()) == []
