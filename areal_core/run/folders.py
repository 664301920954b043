"""Where the state of runs lies: folders of runs, the cache of base models, the database of MLflow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from areal_core.config.fields import refuse_credentials
from areal_core.config.groups import MLFLOW_CREDENTIALS
from areal_core.config.schema import RunConfig
from areal_core.storage.rundir import RunDir

Log = Callable[[str], None]


def run_folder(config: RunConfig, run_id: str) -> RunDir:
    return RunDir(Path(config.state_dir).absolute() / "runs" / run_id)


def tracking_uri(config: RunConfig) -> str | None:
    """Where MLflow is: tracking.uri, MLFLOW_TRACKING_URI, or a SQLite file in the state folder; None when off. Raises
    ConfigError where the variable holds credentials."""
    if not config.tracking.enabled:
        return None
    if config.tracking.uri:
        return config.tracking.uri
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        refuse_credentials("MLFLOW_TRACKING_URI", uri, MLFLOW_CREDENTIALS)
        return uri
    folder = Path(config.state_dir).absolute() / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"
