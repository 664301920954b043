"""The best version of a run: the one with the highest held-out accuracy, of several the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_core.errors import StorageError
from areal_core.models.adapters import merged
from areal_core.models.spec import read_arrays, read_spec
from areal_core.models.tensorfile import write_tensors
from areal_core.storage import lease, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.types import Evaluation, PolicyVersion

_WEIGHTS = "model.safetensors"


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    return max(evaluations, key=lambda known: (known.accuracy, -known.version), default=None)


def export(run: RunDir, storage: Storage, version: PolicyVersion, card: str) -> str:
    """Put a version into the store as a model folder beside the final model, whose tokenizer and settings it shares;
    an adapter is merged into the base model. Returns its URL. Raises StorageError, and LeaseLostError."""
    lease.check(storage, run.info().number)
    final, best = storage.child("final"), storage.child("best")
    if not weights.is_whole(version):
        raise StorageError(f"{version.path}: version {version.version} is gone or damaged")
    scratch = run.root / "best"
    scratch.mkdir(exist_ok=True)
    for name in final.list():
        if not name.endswith(".safetensors") and name != "README.md":
            final.get_file(name, scratch / name)
            best.put_file(scratch / name, name)
    file = weights.weights_file(Path(version.path))
    if (lora := run.config().training.lora.adapter) is not None and version.version:
        base = Path(run.info().model_path)
        whole = merged(read_arrays(base, read_spec(base)), weights.load(version), lora)
        file = scratch / _WEIGHTS
        write_tensors(file, whole)
    best.put_file(file, _WEIGHTS)
    best.put_bytes("README.md", card.encode())
    return best.url
