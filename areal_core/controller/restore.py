"""What a controller starts from: the ledger of its run, restored where it is missing."""

from __future__ import annotations

import logging

from safetensors.numpy import load_file

from areal_core.rollout.ledger import TrajectoryLedger
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir

logger = logging.getLogger(__name__)


def restore(run: RunDir, storage: Storage) -> int | None:
    """On a machine where this run has no ledger yet, take it and its policy version from the newest checkpoint. Returns
    that version; None where there was nothing to do."""
    if run.ledger.exists():
        return None
    newest = checkpoint.newest(storage)
    if newest is None:
        return None
    files = checkpoint.fetch(storage, newest, run.root / "restored")
    state = load_file(files[checkpoint.STATE])
    tensors = {name.removeprefix("weight/"): array for name, array in state.items() if name.startswith("weight/")}
    version = weights.publish(run.weights, newest.step, tensors, dtype=run.config().training.dtype)
    ledger = TrajectoryLedger(files[checkpoint.LEDGER], group_size=run.config().algorithm.group_size)
    ledger.rewind(version.version)  # it was copied after the trainer's state, and may know more
    ledger.publish(version)
    ledger.close()
    files[checkpoint.LEDGER].replace(run.ledger)
    logger.info("restored the ledger from the checkpoint of step %d", newest.step)
    return newest.step
