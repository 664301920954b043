"""Addresses of MLflow's pages, and what its table of runs shows. A database has no pages: its addresses are None."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal
from urllib.parse import quote

NOTE = "mlflow.note.content"  # tag of a run or an experiment: the description on its page
_VIEW = "areal"
VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"  # of an experiment: MLflow lists it under *Views*
_TRAINING = "workflowType=machine_learning"  # without it a browser shows the pages of chat applications
_COLUMNS = {  # of the table: width in pixels
    "tags.`mode`": 64,
    "tags.`eta`": 48,
    "metrics.`heldout/accuracy`": 135,
    "metrics.`final/effective_tokens_per_s`": 185,
    "metrics.`final/staleness_mean`": 150,
    "metrics.`final/rl_wall_s`": 120,
}


def view(created_ms: int) -> str:
    """The value of VIEW_TAG: the columns, best score first. MLflow's own order, by time, folds the trials of a
    comparison into one row."""
    names = [*_COLUMNS]
    columns = {"selectedColumns": names, "columnOrder": names, "columnWidths": _COLUMNS}
    state = columns | {"orderByKey": "metrics.`heldout/accuracy`", "orderByAsc": False}
    return json.dumps({"name": _VIEW, "createdAt": created_ms, "state": json.dumps(state)})


def table_path(experiment_id: str) -> str:
    """The table of an experiment's runs, relative to the server's address; other settings there would undo the view."""
    return f"#/experiments/{experiment_id}/runs?{_TRAINING}&viewStateShareKey={_VIEW}"


def table_page(uri: str, experiment_id: str) -> str | None:
    return _page(uri, table_path(experiment_id))


def run_page(uri: str, experiment_id: str, run_id: str) -> str | None:
    return _page(uri, f"#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING}")


def curves_page(
    uri: str, experiment_id: str, run_ids: Sequence[str], metric: str, x_axis: Literal["relative", "step"]
) -> str | None:
    """A metric of several runs in one chart, over the time since its first point, or over steps."""
    values = {"runs": run_ids, "metric": metric, "experiments": [experiment_id], "plot_metric_keys": [metric]}
    query = "&".join(f"{name}={quote(json.dumps(value, separators=(',', ':')))}" for name, value in values.items())
    return _page(uri, f"#/metric?{query}&x_axis={x_axis}&show_point=true&{_TRAINING}")


def _page(uri: str, path: str) -> str | None:
    return f"{uri.rstrip('/')}/{path}" if uri.startswith("http") else None
