"""A comparison's own run in MLflow, the parent of its trials' runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_core.run.folders import run_folder, tracking_uri
from areal_core.storage.rundir import write_json
from areal_core.tracking import mlflow_client
from areal_core.tracking.outbox import EndStatus
from areal_core.tracking.pages import curves_page, run_page, table_page
from flows.comparison.design import Comparison, Trial


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The comparison's run in MLflow."""

    uri: str
    experiment_id: str
    run_id: str

    def places(self, trials: Sequence[Trial]) -> dict[str, str]:
        """Addresses of MLflow's pages: the comparison, all runs, and the curves of started trials."""
        at = self.uri, self.experiment_id
        pages = {"MLflow": run_page(*at, self.run_id) or self.uri, "table of runs": table_page(*at)}
        if children := _children(trials):
            metric = "heldout/accuracy" if trials[0].config.evaluated else "ledger/consumed_tokens"
            pages["curves over time"] = curves_page(*at, children, metric, "relative")
            pages["curves over steps"] = curves_page(*at, children, metric, "step")
        return {what: page for what, page in pages.items() if page is not None}

    def add(self, metrics: Mapping[str, float], step: int, files: Iterable[Path]) -> None:
        """Add metrics and report files to the run. Raises TrackingError."""
        mlflow_client.add_to_run(self.uri, self.run_id, metrics=metrics, step=step, files=files, folder="report")

    def end(self, status: EndStatus) -> None:
        """End the run. Raises TrackingError."""
        mlflow_client.end_run(self.uri, self.run_id, status)


def open_parent(comparison: Comparison, trials: Sequence[Trial], tags: Mapping[str, str]) -> Parent | None:
    """Open the comparison's run in MLflow, or resume it; None if the reference arm is not tracked.

    The comparison's folder stores the run id. The address is the current one, as a server's address may have changed.
    Each call updates the run's tags and config.json. Raises TrackingError."""
    config = trials[0].config  # the first trial is of the reference arm
    uri = tracking_uri(config)
    if uri is None:
        return None
    labels = {
        "comparison": comparison.name,
        "experiment": comparison.experiment,
        "arms": ", ".join(comparison.arms),
        "seeds": ", ".join(map(str, comparison.seeds)),
        **tags,
    }
    settings = {
        "experiment": comparison.experiment,
        "arms": {arm: " ".join(overrides) for arm, overrides in comparison.arms.items()},
        "seeds": labels["seeds"],
        "overrides": " ".join(comparison.overrides),
    }
    known = comparison.folder() / "tracking.json"
    run_id = json.loads(known.read_text())["run_id"] if known.exists() else None
    if run_id is None or not mlflow_client.resume_run(uri, run_id, labels, settings):
        run_id = mlflow_client.start_run(uri, config.tracking.experiment, comparison.name, labels, settings)
    parent = Parent(uri=uri, experiment_id=mlflow_client.experiment_of(uri, run_id), run_id=run_id)
    write_json(known, dataclasses.asdict(parent))
    return parent


def _children(trials: Sequence[Trial]) -> list[str]:
    """MLflow run ids of the trials that were started."""
    folders = [run_folder(trial.config, trial.run_id) for trial in trials]
    ids = [folder.info().tracking_run_id for folder in folders if (folder.root / "run.json").exists()]
    return [run_id for run_id in ids if run_id is not None]
