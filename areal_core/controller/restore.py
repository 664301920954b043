"""What a controller starts from: a ledger that belongs to the newest checkpoint, and versions that servers can load.

The ledger in the run's folder belongs to the run as long as it has published what the newest checkpoint in the store
holds, and has the batches from there on. It does not where the folder is older than the store: its disk has lost power,
or was put back, or the run has gone on elsewhere meanwhile; or where newer checkpoints turned out to be damaged. Then
the ledger that was saved beside that checkpoint is taken, and the other one kept beside it. A damaged ledger belongs to
nothing; before the first checkpoint the run begins anew without it.
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

_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL)  # what says nothing of the ledger itself


def restore(run: RunDir, storage: Storage) -> int | None:
    """Where this run has no ledger in its folder, or one that does not belong to the newest checkpoint, take that one's
    and its policy version. Returns that version; None where there was nothing to take. A damaged ledger is set aside
    even so.

    Raises StorageError when no checkpoint is whole and the ledger belongs to none."""
    newest = checkpoint.newest(storage)
    if _belongs(run, newest):
        return None
    if newest is None:
        if run.ledger.exists():
            kept = _set_aside(run)
            logger.warning("there is no checkpoint yet: the run begins anew; its ledger is kept as %s", kept.name)
        return None

    def fetched(info: CheckpointInfo) -> dict[str, Path]:
        checkpoint.fetch_shared(storage, info, run.payloads)
        return checkpoint.fetch(storage, info, run.root / "restored", (checkpoint.WEIGHTS, info.ledger))

    found = checkpoint.newest_of(storage, fetched)
    if found is None:
        if run.ledger.exists():
            raise StorageError(
                f"{storage.url}: no checkpoint is whole, and {run.ledger} does not belong to any: start the run under "
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
        ledger.rewind(version.version)  # it was copied after the trainer's state, and may know more
        ledger.publish(version)
    if run.ledger.exists():
        kept = _set_aside(run)
        logger.warning("the ledger is not that of the checkpoint of step %d; it is kept as %s", newest.step, kept.name)
    for suffix in ("-wal", "-shm"):  # of another ledger: SQLite would take them for this one's
        run.ledger.with_name(run.ledger.name + suffix).unlink(missing_ok=True)
    durable.replace(files[info.ledger], run.ledger)
    shutil.rmtree(run.root / "restored")
    logger.info("restored the ledger from the checkpoint of step %d", info.step)
    return info.step


def forget_damaged(ledger: TrajectoryLedger) -> None:
    """Mark the versions whose weights are not what was published, which no server could load: a loss of power may have
    torn any of those that are here. The newest have to be here as well; the trainer makes them again, from its
    checkpoint."""
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
    """Whether the ledger in the run's folder is there, and the run can go on from this checkpoint with it, or from its
    beginning."""
    if not run.ledger.exists():
        return False
    try:
        with closing(TrajectoryLedger(run.ledger, group_size=run.config().algorithm.group_size)) as ledger:
            if found := ledger.damage():
                logger.warning("%s is damaged: %s", run.ledger, found)
                return False
            if newest is None:
                return True
            if ledger.payloads.forgotten > newest.step:
                return False  # the batches from there on can't be trained on again
            return ledger.versions.digest(newest.step) == newest.extra[checkpoint.VERSION]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in _PASSING:
            raise
        logger.warning("%s can't be read: %s", run.ledger, error)
        return False


def _set_aside(run: RunDir) -> Path:
    """Rename the ledger, with the files that SQLite keeps beside it."""
    number = next(number for number in itertools.count(1) if not (run.root / f"ledger-{number}.sqlite").exists())
    for suffix in ("", "-wal", "-shm"):
        file = run.ledger.with_name(run.ledger.name + suffix)
        if file.exists():
            file.rename(run.root / f"ledger-{number}.sqlite{suffix}")
    return run.root / f"ledger-{number}.sqlite"
