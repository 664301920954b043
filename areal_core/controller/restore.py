"""Restore a ledger that fits the newest checkpoint, and versions that servers can load.

The ledger in the run's folder fits if it has published the version of the newest checkpoint in the store, and holds
the later batches. It does not fit if the folder is older than the store: the disk lost power or was restored, or the
run continued elsewhere. It also does not fit if newer checkpoints turned out to be damaged. Then the ledger saved with
the checkpoint replaces it, and the old ledger is kept beside it. A damaged ledger never fits. Before the first
checkpoint, a run with a damaged ledger begins anew.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from safetensors.numpy import load_file

from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.errors import StorageError
from areal_core.models.tensorfile import to_bfloat16
from areal_core.storage import checkpoint, durable, weights
from areal_core.storage.checkpoint import CheckpointInfo
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir

logger = logging.getLogger(__name__)

_TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL)  # transient errors, unrelated to the ledger's content


def restore(run: RunDir, storage: Storage) -> int | None:
    """Restore ledger and version from the newest checkpoint, unless the ledger in the run's folder fits.

    Returns the restored version, or None if nothing was restored. Sets a damaged ledger aside in either case.
    Raises StorageError if no checkpoint is complete and the ledger fits none."""
    newest = checkpoint.newest(storage)
    if _belongs(run, newest):
        return None
    if newest is None:
        if run.ledger.exists():
            kept = _set_aside(run)
            logger.warning(
                "no checkpoint exists: the run starts from the beginning; the old ledger is kept as %s", kept.name
            )
        return None

    def fetched(info: CheckpointInfo) -> dict[str, Path]:
        checkpoint.fetch_shared(storage, info, run.payloads)
        return checkpoint.fetch(storage, info, run.root / "restored", (checkpoint.WEIGHTS, info.ledger))

    found = checkpoint.newest_of(storage, fetched)
    if found is None:
        if run.ledger.exists():
            raise StorageError(
                f"{storage.url}: no checkpoint is complete, and {run.ledger} matches none of them: start the run under "
                "another id"
            )
        return None
    info, files = found
    weight = load_file(files[checkpoint.WEIGHTS])
    tensors = {name.removeprefix("weight/"): array for name, array in weight.items()}
    training = run.config().training
    if training.dtype == "bfloat16":
        tensors = {name: to_bfloat16(array) for name, array in tensors.items()}
    version = weights.publish(run.weights, info.step, tensors, lora=training.lora.adapter)
    with closing(TrajectoryLedger(files[info.ledger], group_size=run.config().algorithm.group_size)) as ledger:
        ledger.rewind(version.version)  # the copy was made after the trainer's state and may know later versions
        ledger.publish(version)
    if run.ledger.exists():
        kept = _set_aside(run)
        logger.warning("the ledger does not match the checkpoint of step %d; it is kept as %s", newest.step, kept.name)
    for suffix in ("-wal", "-shm"):  # SQLite would apply these files of the other ledger to the new one
        run.ledger.with_name(run.ledger.name + suffix).unlink(missing_ok=True)
    durable.replace(files[info.ledger], run.ledger)
    shutil.rmtree(run.root / "restored")
    logger.info("restored the ledger from the checkpoint of step %d", info.step)
    return info.step


def forget_damaged(ledger: TrajectoryLedger) -> None:
    """Mark versions as damaged if their files differ from the published ones.
    Also marks missing versions newer than the newest complete one. The trainer makes them again from its checkpoint."""
    known = ledger.versions.loadable()
    here = [version for version in known if Path(version.path).exists()]
    with ThreadPoolExecutor() as readers:
        whole = {
            version for version, is_whole in zip(here, readers.map(weights.is_whole, here), strict=True) if is_whole
        }
    newest = max((version.version for version in whole), default=0)
    for version in known:
        if version not in whole and (version in here or version.version > newest):
            logger.warning("version %d is damaged: %s", version.version, version.path)
            ledger.versions.mark_damaged(version.version)


def _belongs(run: RunDir, newest: CheckpointInfo | None) -> bool:
    """Whether the folder has an undamaged ledger with which the run can continue from `newest`.
    Without a checkpoint, whether it can continue from the beginning."""
    if not run.ledger.exists():
        return False
    try:
        with closing(TrajectoryLedger(run.ledger, group_size=run.config().algorithm.group_size)) as ledger:
            if found := ledger.find_damage():
                logger.warning("%s is damaged: %s", run.ledger, found)
                return False
            if newest is None:
                return True
            if ledger.payloads.forgotten > newest.step:
                return False  # it lacks the payloads of the next batches to train on
            return ledger.versions.digest(newest.step) == newest.extra[checkpoint.VERSION]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in _TRANSIENT:
            raise
        logger.warning("%s can't be read: %s", run.ledger, error)
        return False


def _set_aside(run: RunDir) -> Path:
    """Rename the ledger and SQLite's files beside it. Returns its new path."""
    number = next(number for number in itertools.count(1) if not (run.root / f"ledger-{number}.sqlite").exists())
    for suffix in ("", "-wal", "-shm"):
        file = run.ledger.with_name(run.ledger.name + suffix)
        if file.exists():
            file.rename(run.root / f"ledger-{number}.sqlite{suffix}")
    return run.root / f"ledger-{number}.sqlite"
