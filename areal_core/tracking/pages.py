"""URLs of MLflow's pages and columns of its table of runs. A database has no pages: URLs are None."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal
from urllib.parse import quote

NOTE = "mlflow.note.content"  # tag of a run or an experiment: the description on its page
_VIEW = "areal"
VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"  # tag of an experiment: a view that MLflow lists under *Views*
_TRAINING = "workflowType=machine_learning"  # otherwise MLflow shows the pages for chat applications
_COLUMNS = {  # column of the table -> width in pixels
    "tags.`mode`": 64,
    "tags.`eta`": 48,
    "metrics.`heldout/accuracy`": 135,
    "metrics.`final/effective_tokens_per_s`": 185,
    "metrics.`final/staleness_mean`": 150,
    "metrics.`final/rl_wall_s`": 120,
}


def view(created_ms: int) -> str:
    """The value of VIEW_TAG: selected columns, sorted by best score.
    MLflow's default order, by time, folds the trials of a comparison into one row."""
    names = [*_COLUMNS]
    columns = {"selectedColumns": names, "columnOrder": names, "columnWidths": _COLUMNS}
    state = columns | {"orderByKey": "metrics.`heldout/accuracy`", "orderByAsc": False}
    return json.dumps({"name": _VIEW, "createdAt": created_ms, "state": json.dumps(state)})


def table_path(experiment_id: str) -> str:
    """Path of an experiment's table of runs on the server; further URL parameters would undo the view."""
    return f"#/experiments/{experiment_id}/runs?{_TRAINING}&viewStateShareKey={_VIEW}"


def table_page(uri: str, experiment_id: str) -> str | None:
    return _page(uri, table_path(experiment_id))


def run_page(uri: str, experiment_id: str, run_id: str) -> str | None:
    return _page(uri, f"#/experiments/{experiment_id}/runs/{run_id}?{_TRAINING}")


def curves_page(
    uri: str, experiment_id: str, run_ids: Sequence[str], metric: str, x_axis: Literal["relative", "step"]
) -> str | None:
    """URL of a chart of one metric of several runs, over relative time or steps."""
    values = {"runs": run_ids, "metric": metric, "experiments": [experiment_id], "plot_metric_keys": [metric]}
    query = "&".join(f"{name}={quote(json.dumps(value, separators=(',', ':')))}" for name, value in values.items())
    return _page(uri, f"#/metric?{query}&x_axis={x_axis}&show_point=true&{_TRAINING}")


def _page(uri: str, path: str) -> str | None:
    return f"{uri.rstrip('/')}/{path}" if uri.startswith("http") else None
