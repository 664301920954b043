"""What the control plane's machine is told, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from flows import control


def test_a_password_that_mlflow_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "secret_values", lambda *_: {"prefect": "a:b", "mlflow": "planted"})
    told = control.Control(str(tmp_path), str(tmp_path), "s3://b", "us-east-1", "/areal/prefect", "/areal/mlflow")
    monkeypatch.setattr(control, "told", lambda kind: told)
    monkeypatch.setenv(control.MARK, "")
    with pytest.raises(ConfigError, match=r"^/areal/mlflow: must have 12 characters at least$"):
        control.serve()
    assert list(tmp_path.iterdir()) == []
