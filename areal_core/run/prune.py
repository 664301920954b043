"""What old runs hold on this machine and in the store, and how it is freed.

An interrupted deletion leaves a run whole or gone for whoever resumes it. The folder is renamed first. Then manifests
are deleted, the newest last, and then all else. Only the lease stays, a few hundred bytes. With it a launcher that
comes back from a long silence finds that it has lost the run, and a new run of that name gets a higher fencing number.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ProcessError, StorageError, TrackingError
from areal_core.launch.supervisor import FileLock
from areal_core.run.disk import store_folder
from areal_core.run.folders import Log
from areal_core.run.ownership import Ownership
from areal_core.storage import checkpoint, durable, lease
from areal_core.storage.lease import LeaseLostError
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir, RunInfo

KINDS = ("checkpoints", "payloads", "models", "logs", "evaluations", "caches", "other")
_KIND_OF = {"final": "models", "best": "models", "timeline": "logs", "weights": "caches"}  # by folder; else its name
_MANIFEST = re.compile(r"checkpoints/step-(\d+)\.(\d+)/manifest\.json")
_PRUNED = ".pruned-"  # what a folder's name begins with once it is to go; no run id does
_PATIENCE_S = 5.0  # with a store that fails

State = Literal["running", "finished", "stopped", "abandoned", "half deleted"]


@dataclass(slots=True, kw_only=True)
class HeldRun:
    """A run, and what it holds."""

    run_id: str
    folder: Path | None = None  # on this machine
    storage: Storage | None = None  # its part of the store; None: nothing of it is there
    elsewhere: str | None = None  # the URL of its store, if that is not the one that was looked at
    state: State = "stopped"  # abandoned: nothing in its store and no MLflow run, or nothing to resume
    changed: float = 0.0  # when a file or an object of it was written last, in seconds since 1970
    bytes: Counter[str] = field(default_factory=Counter[str])  # by kind
    leftovers: int = 0  # bytes that dead launchers have left in its store


def held_runs(config: RunConfig, log: Log) -> list[HeldRun]:
    """All runs in `state_dir` and in the store of `config`, those that changed last at the end. Raises StorageError."""
    runs: dict[str, HeldRun] = {}
    objects: dict[str, dict[str, float]] = {}  # of a run: when they were put, by name
    store = _opened(config)
    if store is not None:
        changed = store.changed("runs")
        for name, size in store.sizes("runs").items():
            run_id, _, rest = name.removeprefix("runs/").partition("/")
            objects.setdefault(run_id, {})[rest] = changed.get(name, 0.0)
            if rest != lease.NAME:
                run = runs.setdefault(run_id, HeldRun(run_id=run_id, storage=store.child(f"runs/{run_id}")))
                _count(run, rest, size, changed.get(name, 0.0))
    root = Path(config.state_dir).absolute() / "runs"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.is_dir():
            run = runs.setdefault(folder.name, HeldRun(run_id=folder.name))
            run.folder = folder
            for name, size, at in _files(folder):
                _count(run, name, size, at)
            run.changed = run.changed or folder.stat().st_mtime
    for run in runs.values():
        run.state = _state(run, objects.get(run.run_id, {}), config, store, log)
        if run.storage is not None and run.state != "running":
            try:
                run.leftovers = sum(checkpoint.leftovers(run.storage, sys.maxsize).values())
            except StorageError as error:
                log(f"{run.run_id}: its leftovers are not counted: {error}")
    return sorted(runs.values(), key=lambda run: run.changed)


def delete(run: HeldRun, config: RunConfig, log: Log) -> None:
    """Delete all of a run but its lease. Raises ProcessError if it runs, and StorageError, OSError."""
    if run.state == "half deleted" and run.folder is not None:
        shutil.rmtree(run.folder)
        return
    with _owned(run, config, log) as (folder, number, confirm):
        renamed = folder.with_name(f"{_PRUNED}{folder.name}-{number}")
        folder.rename(renamed)
        durable.sync(renamed.parent)
        if run.storage is not None:
            names = run.storage.list()
            manifests = [match for name in names if (match := _MANIFEST.fullmatch(name))]
            ordered = [match[0] for match in sorted(manifests, key=lambda match: (int(match[2]), int(match[1])))]
            tops = {name.partition("/")[0] for name in names}
            for name in (*ordered, *sorted(top for top in tops if top != lease.NAME)):
                confirm()
                run.storage.delete(name)
        shutil.rmtree(renamed)


def free_leftovers(run: HeldRun, config: RunConfig, log: Log) -> int:
    """Delete what dead launchers have left in the store of a run, which can be resumed as before; returns the bytes.
    Raises as `delete` does."""
    assert run.storage is not None
    with _owned(run, config, log) as (folder, number, confirm):
        left = checkpoint.leftovers(run.storage, number)
        for name in sorted(left, key=lambda name: not name.endswith("/manifest.json")):
            confirm()
            run.storage.delete(name)
        if run.folder is None:
            shutil.rmtree(folder)
    return sum(left.values())


def _check_unchanged(run: HeldRun) -> None:
    """Raise ProcessError for a run that somebody has resumed since it was listed."""
    put = run.storage.changed().items() if run.storage is not None else ()
    times = [at for name, at in put if name != lease.NAME]
    times += [at for _, _, at in _files(run.folder)] if run.folder is not None else []
    if any(at > run.changed for at in times):
        raise ProcessError(f"run_id: {run.run_id} has changed since it was listed")


@contextmanager
def _owned(run: HeldRun, config: RunConfig, log: Log) -> Iterator[tuple[Path, int, Callable[[], None]]]:
    """Own the run: its folder, which is made if there is none, the fencing number, and a check before each deletion
    that nobody has taken the run over."""
    if run.elsewhere is not None:
        raise ConfigError(f"{run.run_id}: its store is {run.elsewhere}; name it as storage.url")
    local = RunDir(run.folder or Path(config.state_dir).absolute() / "runs" / run.run_id)
    local.root.mkdir(parents=True, exist_ok=True)
    lost: list[LeaseLostError] = []

    def confirm() -> None:
        if lost:
            raise lost[0]

    if run.storage is None:
        busy = f"run_id: {run.run_id} is running already; wait for its end"
        with FileLock(local.launcher_lock, timeout_s=0.0, busy=busy):
            _check_unchanged(run)
            yield local.root, 0, confirm
        return
    with suppress(OSError, ValueError):  # launchers must agree on how long a silent one counts as alive
        config = local.config()
    with Ownership(local, config, run.storage.url, log=log, on_lost=lost.append) as owned:
        _check_unchanged(run)
        yield local.root, owned.number, confirm


def _opened(config: RunConfig) -> Storage | None:
    """The store of `config`; None for a folder that is not there."""
    folder = store_folder(config.storage.url)
    if folder is not None and not folder.is_dir():
        return None
    return Storage.open(config.storage.url, config.storage.endpoint_url, _PATIENCE_S)


def _files(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Name below `folder`, bytes and time of the last change of every file but the lock."""
    for file in (Path(above, name) for above, _, names in os.walk(folder) for name in names if name != "lock"):
        with suppress(FileNotFoundError):  # the run runs
            found = file.lstat()
            yield str(file.relative_to(folder)), found.st_size, found.st_mtime


def _count(run: HeldRun, name: str, size: int, changed: float) -> None:
    top = name.partition("/")[0] if "/" in name else ""
    kind = _KIND_OF.get(top, top)
    run.bytes[kind if kind in KINDS else "other"] += size
    run.changed = max(run.changed, changed)


def _state(run: HeldRun, objects: Mapping[str, float], config: RunConfig, store: Storage | None, log: Log) -> State:
    if run.run_id.startswith(_PRUNED):
        return "half deleted"
    finished = "final/README.md" in objects or "summary.json" in objects
    tracked = False
    if run.folder is not None:
        local = RunDir(run.folder)
        if FileLock.is_held(local.launcher_lock):
            return "running"
        finished = finished or local.summary.exists()
        try:
            info = local.info()
        except (OSError, ValueError, TypeError):
            info = None
        here = None if store is None else f"{store.url.rstrip('/')}/runs/{run.run_id}"
        if info is not None and info.checkpoint_url != here and _may_hold(info.checkpoint_url):
            run.elsewhere = info.checkpoint_url
        tracked = run.storage is None and info is not None and _is_tracked(info, log)
    renewed = objects.get(lease.NAME, 0.0) > time.time() - 2 * config.storage.lease_s
    if renewed and run.storage is not None and lease.is_held(run.storage):
        return "running"  # on another machine
    stored = run.storage is not None and (finished or run.folder is not None or any(map(_MANIFEST.fullmatch, objects)))
    if not (stored or tracked or run.elsewhere):
        return "abandoned"
    return "finished" if finished else "stopped"


def _may_hold(url: str) -> bool:
    folder = store_folder(url)
    return folder is None or folder.is_dir()


def _is_tracked(info: RunInfo, log: Log) -> bool:
    """Whether MLflow has the run; so it counts where MLflow can't be asked."""
    if info.tracking_uri is None or info.tracking_run_id is None:
        return False
    from areal_core.tracking.mlflow_client import has_run  # seconds of imports

    try:
        return has_run(info.tracking_uri, info.tracking_run_id)
    except TrackingError as error:
        log(f"{info.run_id}: {error}")
        return True
