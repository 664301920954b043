"""Export the best version of a run as a model folder, and write model cards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal_core.config.schema import RunConfig
from areal_core.errors import StorageError
from areal_core.models.adapters import merged
from areal_core.models.spec import read_arrays, read_spec
from areal_core.models.tensorfile import write_tensors
from areal_core.storage import lease, weights
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.types import Evaluation, PolicyVersion, RunSummary

_WEIGHTS = "model.safetensors"


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation with the highest held-out accuracy; the earliest version of equal ones."""
    return max(evaluations, key=lambda known: (known.accuracy, -known.version), default=None)


def export(run: RunDir, storage: Storage, version: PolicyVersion, card: str) -> str:
    """Store a version as a model folder, with the final model's tokenizer and settings.
    An adapter is merged into the base model. Returns the folder's URL. Raises StorageError, and LeaseLostError."""
    lease.check(storage, run.info().number)
    final, best = storage.child("final"), storage.child("best")
    if not weights.is_whole(version):
        raise StorageError(f"{version.path}: version {version.version} is missing or damaged")
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


def model_card(config: RunConfig, summary: RunSummary, best: Evaluation | None = None) -> str:
    """Return a model card in Markdown, with the Hub's header, for the final version or for the `best` one."""
    base = config.model.path or "the embedded model, made by a supervised warm-up"
    its = summary
    scores = "No version was evaluated."
    if its.accuracy_before is not None and its.accuracy_after is not None:
        scores = f"Held-out accuracy: {its.accuracy_before:.3f} before the training, {its.accuracy_after:.3f} after it."
    if best is not None:
        scores += f" This is version {best.version}, its best one: {best.accuracy:.3f}."
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [areal, reinforcement-learning]",
        "---",
        f"# {its.run_id}",
        "",
        f"Trained from {base} by reinforcement learning with AReaL, mode {its.mode}: {its.steps} steps "
        f"of {config.rollout.batch_size} completions of `{config.task_label}`, seed {its.seed}, "
        f"{its.tokens.consumed:,} tokens.",
        "",
        scores,
        "",
    ]
    return "\n".join(lines)
