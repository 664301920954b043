"""List the space that old runs use on this machine and in the store, and free it.

An interrupted deletion leaves a run either complete or gone for a launcher that resumes it. First the folder is
renamed. Then the manifests are deleted, the newest last, and then all other objects. Only the lease remains, a few
hundred bytes. A launcher that was silent for long learns from the lease that it has lost the run. A new run of that
name gets a higher fencing number.
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
_PRUNED = ".pruned-"  # prefix of a folder that is being deleted; no run id starts with it
_PATIENCE_S = 5.0  # retries of a failing store

State = Literal["running", "finished", "stopped", "half deleted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run and the space it uses."""

    run_id: str
    folder: Path  # on this machine; may be absent
    storage: Storage | None  # the run's part of the store; None without a store
    state: State
    changed: float  # last write of a file or object, in seconds since 1970
    local_bytes: int  # on this machine
    stored_bytes: int
    leftover_bytes: int  # part of stored_bytes that dead launchers left behind


def stored_runs(config: RunConfig, log: Log) -> list[StoredRun]:
    """All runs in `state_dir` and in the store, least recently changed first. Raises StorageError."""
    url, root = config.storage.url, run_folder(config, "").root
    store = Storage.open(url, config.storage.endpoint_url, _PATIENCE_S) if _may_hold(url) else None
    run_ids = {folder.name for folder in root.iterdir() if folder.is_dir()} if root.is_dir() else set[str]()
    for name in store.list("runs") if store is not None else ():
        run_id, _, rest = name.removeprefix("runs/").partition("/")
        if rest != lease.NAME:
            run_ids.add(run_id)
    return sorted((_stored_run(run_id, config, store, log) for run_id in run_ids), key=lambda run: run.changed)


def delete(run: StoredRun, config: RunConfig, log: Log) -> None:
    """Delete a run except its lease. Raises ProcessError if it runs, ConfigError, StorageError, OSError."""
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
            with suppress(StorageError):  # no checkpoint is complete
                last = newest.folder if (newest := checkpoint.newest(run.storage)) else last
            marks = filter(_MANIFEST.fullmatch, names)
            ordered = sorted(marks, key=lambda name: (name.startswith(f"{last}/"), name.endswith("damaged.json")))
            folders = {"/".join(name.split("/")[:2]) for name in names} - {lease.NAME}  # later launchers have others
            for name in (*ordered, *sorted(folders)):
                confirm()
                run.storage.delete(name)
        shutil.rmtree(renamed)


def free_leftovers(run: StoredRun, config: RunConfig, log: Log) -> None:
    """Delete the objects that dead launchers left in a run's store; the run can still be resumed.
    Raises the same errors as `delete`."""
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
def _owned(run: StoredRun, config: RunConfig, log: Log) -> Iterator[tuple[int, Callable[[], None]]]:
    """Own the run within the `with`; yields the fencing number, and a check to call before each deletion.
    The check raises if another launcher has taken over the run. Makes the run's folder if there is none. Raises
    ProcessError for a run that was resumed after it was listed."""
    local = RunDir(run.folder)
    url = own = run.storage.url if run.storage is not None else None
    with suppress(OSError, ValueError, TypeError):  # run.json is missing or incomplete
        url = local.info().checkpoint_url
    if url is not None and url != own and _may_hold(url):
        wanted = f"{url.removesuffix(f'/runs/{run.run_id}')}, where run {run.run_id} has its checkpoints"
        raise ConfigError(f"storage.url: must be {wanted}, got {config.storage.url}")
    local.root.mkdir(parents=True, exist_ok=True)

    def check_unchanged() -> None:
        if _changed(run.folder, run.storage.write_times() if run.storage is not None else {}) > run.changed:
            raise ProcessError(f"run_id: {run.run_id} has changed since it was listed; list the runs again")

    if run.storage is None:
        busy = f"run_id: {run.run_id} is already running; wait for its end"
        with FileLock(local.launcher_lock, timeout_s=0.0, busy=busy):
            check_unchanged()
            yield 0, lambda: None
        return
    with Ownership(local, config, run.storage.url, log=log) as owned:
        check_unchanged()
        yield owned.number, partial(lease.check, run.storage, owned.number)


def _stored_run(run_id: str, config: RunConfig, store: Storage | None, log: Log) -> StoredRun:
    local = run_folder(config, run_id)
    storage = store.child(f"runs/{run_id}") if store is not None else None
    sizes, put = (storage.sizes(), storage.write_times()) if storage is not None else ({}, {})
    finished = local.summary.exists() or {"summary.json", "final/README.md"} & put.keys()
    state: State = "finished" if finished else "stopped"
    if run_id.startswith(_PRUNED):
        state = "half deleted"
    elif FileLock.is_held(local.launcher_lock) or (
        storage is not None and put.get(lease.NAME, 0.0) > time.time() - 2 * lease.held_s(storage)
    ):
        state = "running"  # on this machine or another one
    leftovers: Mapping[str, int] = {}
    if storage is not None and state != "running":
        try:
            leftovers = checkpoint.leftovers(storage, sys.maxsize)
        except StorageError as error:
            log(f"{run_id}: can't count its leftover files: {error}")
    return StoredRun(
        run_id=run_id,
        folder=local.root,
        storage=storage,
        state=state,
        changed=_changed(local.root, put) or time.time(),  # no files yet: a launcher may be about to write the first
        local_bytes=sum(file.st_size for file in _files(local.root)),
        stored_bytes=sum(sizes.values()),
        leftover_bytes=sum(leftovers.values()),
    )


def _changed(folder: Path, put: Mapping[str, float]) -> float:
    """Time of the last write to a run; 0.0 for a run without files.
    Ignores its lock and its lease, which deletions renew."""
    objects = (at for name, at in put.items() if name != lease.NAME)
    return max((*objects, *(file.st_mtime for file in _files(folder))), default=0.0)


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Status of every file below `folder` except the lock."""
    for file in (Path(above, name) for above, _, names in os.walk(folder) for name in names if name != "lock"):
        with suppress(FileNotFoundError):  # a running run may delete files meanwhile
            yield file.lstat()


def _may_hold(url: str) -> bool:
    """Whether a store may hold objects: not if its folder is absent, which opening it would create."""
    folder = store_folder(url)
    return folder is None or folder.is_dir()
