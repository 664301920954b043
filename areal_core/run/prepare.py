"""Prepare a run: make the folder that its processes start from, out of a configuration.

The base model is made once, and the tracking run is opened once. An existing run is resumed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from areal_core.config.fields import check_file_name, leaves, of_task
from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import check_digests, data_set
from areal_core.errors import ConfigError
from areal_core.run.folders import Log, base_model, run_folder, tracking_uri
from areal_core.run.ownership import Ownership
from areal_core.run.preflight import preflight
from areal_core.storage import checkpoint, durable
from areal_core.storage.checkpoint import CheckpointInfo
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo
from areal_core.storage.weights import base_version
from areal_core.tracking.outbox import Outbox
from areal_core.tracking.pages import NOTE

_TAGGED_PACKAGES = ("areal-flows", "torch", "transformers", "numpy", "mlflow", "prefect")
# Fields that may differ between a run and its resumption on the same machine.
_MAY_CHANGE = (
    *(f"training.{name}" for name in ("steps", "engine", "zero_stage", "ranks", "hosts", "collective_timeout_s")),
    *("stop.*", "health.*", "launch.*", "provision.*", "state_dir"),
    *("storage.patience_s", "storage.lease_s", "environment.max_no_result"),
)
_MAY_MOVE = (*_MAY_CHANGE, "model.path", "task.path", "task.held_out_path", "storage.*", "tracking.*")  # elsewhere


def prepare(
    config: RunConfig,
    *,
    run_id: str | None = None,
    flow_run_id: str | None = None,
    flow_run_page: str | None = None,
    tags: Mapping[str, str] | None = None,
    log: Log = print,
) -> RunDir:
    """Prepare the folder of a run; resume the run if `run_id` already exists.

    `tags` are added to the tracking run's own tags. `flow_run_page` is the URL of the flow run's page.

    Raises the errors of `preflight`. Raises ConfigError for a resumed run whose configuration differs. Raises
    ProcessError if the warm-up of the base model fails, or if the run is already running.
    """
    if not run_id:
        plain = re.sub(r"[^A-Za-z0-9]+", "-", config.label).strip("-") or "run"
        run_id = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    run = run_folder(config, check_file_name("run_id", run_id))
    resumed = (run.root / "run.json").exists()
    if resumed:
        _check_unchanged(run.config().to_dict(), config, _MAY_CHANGE)
        if run.summary.exists() and not _extends(run, config):
            log(f"run {run_id} has already finished")
            return run
    for name, its in config.by_task.items():
        with of_task(name):
            if not its.task.trains:  # held-out prompts alone are enough for an evaluation
                raise ConfigError("task.path: must name a file of training prompts")
    prompts = preflight(config, log, resumed=resumed)
    if resumed:
        check_digests(run.info().prompts, prompts)
        return _adopted(run, config, flow_run_id, log)
    storage = _store(config.storage.url, config).child(f"runs/{run_id}")
    if stored := checkpoint.newest(storage):
        _check_unchanged(stored.extra["config"], config, _MAY_MOVE)
        check_digests(stored.extra.get(checkpoint.PROMPTS, {}), prompts)
    model = base_model(config, log)
    _check_base(stored, model)
    run.root.mkdir(parents=True, exist_ok=True)
    with Ownership(run, config, storage.url, log=log):
        if not (run.root / "run.json").exists():  # else another launcher prepared the run first
            about = _tags(config, run_id, flow_run_id) | {NOTE: _description(config, storage.url, flow_run_page)}
            experiment_id, tracking_run_id = _start_tracking(config, run_id, about | dict(tags or {}))
            info = RunInfo(
                run_id=run_id,
                model_path=str(model),
                checkpoint_url=storage.url,
                tracking_uri=tracking_uri(config),
                tracking_experiment_id=experiment_id,
                tracking_run_id=tracking_run_id,
                flow_run_id=flow_run_id,
                prompts=prompts,
            )
            return RunDir.create(config, info)
    return prepare(config, run_id=run_id, flow_run_id=flow_run_id, flow_run_page=flow_run_page, tags=tags, log=log)


def _store(url: str, config: RunConfig) -> Storage:
    return Storage.open(url, config.storage.endpoint_url, config.storage.patience_s)


def _adopted(run: RunDir, config: RunConfig, flow_run_id: str | None, log: Log) -> RunDir:
    """Resume a run whose folder exists, with this configuration."""
    info = run.info()
    if config.training.lora.rank is not None:
        _check_base(checkpoint.newest(_store(info.checkpoint_url, config)), Path(info.model_path))
    with Ownership(run, config, info.checkpoint_url, log=log):
        log(f"resuming run {info.run_id}")
        if run.summary.exists():
            durable.replace(run.summary, run.superseded)
        with closing(Outbox(run.outbox, info.run_id)) as outbox:
            outbox.reopen()
        return RunDir.create(config, dataclasses.replace(info, flow_run_id=flow_run_id or info.flow_run_id))


def _extends(run: RunDir, config: RunConfig) -> bool:
    """Whether `config` gives a finished run a later end."""
    before, steps = run.config(), json.loads(run.summary.read_text())["steps"]
    other_end = (config.training.steps, config.stop) != (before.training.steps, before.stop)
    return other_end and config.training.steps > steps


def _start_tracking(config: RunConfig, run_id: str, tags: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Open the run in MLflow and return the ids of its experiment and run; (None, None) without tracking."""
    uri = tracking_uri(config)
    if uri is None:
        return None, None
    from areal_core.tracking.mlflow_client import experiment_of, start_run  # seconds of imports

    contexts: tuple[Literal["training", "evaluation"], ...] = ("training", "evaluation")[: 1 + config.evaluated]
    sets = dict.fromkeys(data_set(its, context) for context in contexts for its in config.by_task.values())
    inputs = [dataclasses.asdict(each) for each in sets]  # several tasks may share a data set
    opened = start_run(uri, config.tracking.experiment, run_id, tags, config.to_dict(), inputs)
    return experiment_of(uri, opened), opened


def _tags(config: RunConfig, run_id: str, flow_run_id: str | None) -> dict[str, str]:
    """Tags that tell runs apart, and the versions of the installed packages."""
    revision = _git_revision()
    tags = {
        "areal.emulated": config.emulated_cluster,
        "mode": config.mode,
        "eta": str(config.max_staleness),
        "seed": str(config.seed),
        "objective": config.algorithm.objective,
        "areal.run_id": run_id,
        "areal.flow_run_id": flow_run_id,
        "areal.git_revision": revision,
        "mlflow.source.name": "python -m areal_core" if flow_run_id is None else "areal",
        "mlflow.source.git.commit": revision and revision.removesuffix("-dirty"),
    }
    for package in _TAGGED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):  # an optional package
            tags[f"version.{package}"] = importlib.metadata.version(package)
    return {name: value for name, value in tags.items() if value}


def _description(config: RunConfig, checkpoint_url: str, flow_run_page: str | None) -> str:
    """Describe the run and link its checkpoints, for its MLflow page."""
    model = f"`{config.model.path}`" if config.model.path else "The embedded model"
    return (
        f"{model} learns {config.task_label}: {config.training.steps} steps of "
        f"{config.rollout.batch_size} completions, {config.mode}, max_staleness {config.max_staleness}, "
        f"seed {config.seed}.\n\nCheckpoints: `{checkpoint_url}`"
        + (f"; [its flow run]({flow_run_page})." if flow_run_page else ".")
    )


def _git_revision() -> str | None:
    """The git commit of this source tree, marked -dirty if files differ; None outside of a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None


def _check_base(stored: CheckpointInfo | None, model: Path) -> None:
    """Raise ConfigError if a checkpoint holds an adapter to another base model."""
    wanted = None if stored is None else stored.extra.get(checkpoint.BASE)
    if stored is not None and wanted is not None and (found := base_version(str(model)).digest) != wanted:
        raise ConfigError(
            f"model.path: must be the base model of the checkpoint of step {stored.step}, with digest {wanted}; "
            f"{model} has {found}"
        )


def _check_unchanged(before: dict[str, Any], now: RunConfig, may_change: Sequence[str]) -> None:
    """Raise ConfigError naming the first field that differs although a resumed run must keep it."""
    old, new = dict(leaves(before)), dict(leaves(now.to_dict()))
    for name in (*old, *(name for name in new if name.endswith(".ratio"))):  # every task of a mixture has a ratio
        known = re.sub(r"^tasks\.\w+\.", "", name)
        if new.get(name) != old.get(name) and not any(fnmatchcase(known, pattern) for pattern in may_change):
            raise ConfigError(
                f"{name}: must be {old.get(name)!r} as when this run was started, got {new.get(name)!r}; "
                f"a resumed run may only change {', '.join(may_change)}"
            )
