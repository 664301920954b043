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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ProcessError, StorageError
from areal_core.launch.supervisor import FileLock
from areal_core.run.folders import Log, run_folder, store_folder
from areal_core.run.ownership import Ownership
from areal_core.storage import checkpoint, durable, lease
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir

_MANIFEST = re.compile(r"checkpoints/[^/]+/manifest(\.damaged)?\.json")
_PRUNED = ".pruned-"  # what a folder's name begins with once it is to go; no run id does
_PATIENCE_S = 5.0  # with a store that fails

State = Literal["running", "finished", "stopped", "half deleted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """A run, and what it holds."""

    run_id: str
    folder: Path  # on this machine, where it may be absent
    storage: Storage | None  # its part of the store; None: there is no store
    state: State
    changed: float  # when a file or an object of it was written last, in seconds since 1970
    local_bytes: int  # on this machine
    stored_bytes: int
    leftover_bytes: int  # of the stored ones, what dead launchers have left


def held_runs(config: RunConfig, log: Log) -> list[HeldRun]:
    """All runs in `state_dir` and in the store of `config`, those that changed last at the end. Raises StorageError."""
    url, root = config.storage.url, run_folder(config, "").root
    store = Storage.open(url, config.storage.endpoint_url, _PATIENCE_S) if _may_hold(url) else None
    run_ids = {folder.name for folder in root.iterdir() if folder.is_dir()} if root.is_dir() else set[str]()
    for name in store.list("runs") if store is not None else ():
        run_id, _, rest = name.removeprefix("runs/").partition("/")
        if rest != lease.NAME:
            run_ids.add(run_id)
    return sorted((_held(run_id, config, store, log) for run_id in run_ids), key=lambda run: run.changed)


def delete(run: HeldRun, config: RunConfig, log: Log) -> None:
    """Delete all of a run but its lease. Raises ProcessError if it runs, and ConfigError, StorageError, OSError."""
    if run.state == "half deleted":
        shutil.rmtree(run.folder)
        return
    with _owned(run, config, log) as (number, confirm):
        renamed = run.folder.with_name(f"{_PRUNED}{run.run_id}-{number}")
        run.folder.rename(renamed)
        durable.sync(renamed.parent)
        if run.storage is not None:
            names = run.storage.list()
            last = "/"
            with suppress(StorageError):  # none is whole
                last = newest.folder if (newest := checkpoint.newest(run.storage)) else last
            marks = filter(_MANIFEST.fullmatch, names)
            ordered = sorted(marks, key=lambda name: (name.startswith(f"{last}/"), name.endswith("damaged.json")))
            folders = {"/".join(name.split("/")[:2]) for name in names} - {lease.NAME}  # a later launcher's are others
            for name in (*ordered, *sorted(folders)):
                confirm()
                run.storage.delete(name)
        shutil.rmtree(renamed)


def free_leftovers(run: HeldRun, config: RunConfig, log: Log) -> None:
    """Delete what dead launchers have left in the store of a run, which can be resumed as before. Raises as `delete`
    does."""
    assert run.storage is not None
    had_folder = run.folder.exists()
    with _owned(run, config, log) as (number, confirm):
        left = checkpoint.leftovers(run.storage, number)
        for name in sorted(left, key=lambda name: not name.endswith("/manifest.json")):
            confirm()
            run.storage.delete(name)
        if not had_folder:
            shutil.rmtree(run.folder)


@contextmanager
def _owned(run: HeldRun, config: RunConfig, log: Log) -> Iterator[tuple[int, Callable[[], None]]]:
    """Own the run, whose folder is made if there is none: the fencing number, and a check before each deletion that
    nobody has taken the run over. Raises ProcessError for a run that somebody has resumed since it was listed."""
    local = RunDir(run.folder)
    url = own = run.storage.url if run.storage is not None else None
    with suppress(OSError, ValueError, TypeError):  # no settings lie there, or half of them
        url = local.info().checkpoint_url
    if url is not None and url != own and _may_hold(url):
        raise ConfigError(f"{run.run_id}: its store is {url}; name it as storage.url")
    local.root.mkdir(parents=True, exist_ok=True)

    def check_unchanged() -> None:
        if _changed(run.folder, run.storage.changed() if run.storage is not None else {}) > run.changed:
            raise ProcessError(f"run_id: {run.run_id} has changed since it was listed")

    if run.storage is None:
        busy = f"run_id: {run.run_id} is running already; wait for its end"
        with FileLock(local.launcher_lock, timeout_s=0.0, busy=busy):
            check_unchanged()
            yield 0, lambda: None
        return
    with Ownership(local, config, run.storage.url, log=log) as owned:
        check_unchanged()
        yield owned.number, partial(lease.check, run.storage, owned.number)


def _held(run_id: str, config: RunConfig, store: Storage | None, log: Log) -> HeldRun:
    local = run_folder(config, run_id)
    storage = store.child(f"runs/{run_id}") if store is not None else None
    sizes, put = (storage.sizes(), storage.changed()) if storage is not None else ({}, {})
    finished = local.summary.exists() or {"summary.json", "final/README.md"} & put.keys()
    state: State = "finished" if finished else "stopped"
    if run_id.startswith(_PRUNED):
        state = "half deleted"
    elif FileLock.is_held(local.launcher_lock) or (
        storage is not None and put.get(lease.NAME, 0.0) > time.time() - 2 * lease.held_s(storage)
    ):
        state = "running"  # here, or on another machine
    leftovers: Mapping[str, int] = {}
    if storage is not None and state != "running":
        try:
            leftovers = checkpoint.leftovers(storage, sys.maxsize)
        except StorageError as error:
            log(f"{run_id}: its leftovers are not counted: {error}")
    return HeldRun(
        run_id=run_id,
        folder=local.root,
        storage=storage,
        state=state,
        changed=_changed(local.root, put) or time.time(),  # a launcher may be about to write its first file
        local_bytes=sum(file.st_size for file in _files(local.root)),
        stored_bytes=sum(sizes.values()),
        leftover_bytes=sum(leftovers.values()),
    )


def _changed(folder: Path, put: Mapping[str, float]) -> float:
    """When a run was written to last: its lock and its lease apart, which deletions renew; 0.0 where it has nothing."""
    objects = (at for name, at in put.items() if name != lease.NAME)
    return max((*objects, *(file.st_mtime for file in _files(folder))), default=0.0)


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Every file below `folder` but the lock."""
    for file in (Path(above, name) for above, _, names in os.walk(folder) for name in names if name != "lock"):
        with suppress(FileNotFoundError):  # the run runs
            yield file.lstat()


def _may_hold(url: str) -> bool:
    """Whether there may be something in a store: not in a folder that is absent, which opening it would make."""
    folder = store_folder(url)
    return folder is None or folder.is_dir()
