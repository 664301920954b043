"""Name and hash a run's training and evaluation prompts, and hold generated texts out of training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import orjson

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A set of prompts, identified by its content or by the settings that generate it."""

    name: str
    digest: str  # hexadecimal SHA-256 of the file's content, else of the settings that generate the prompts
    source: str
    context: str  # training or evaluation


def data_set(config: RunConfig, context: Literal["training", "evaluation"]) -> DataSet:
    """Describe the prompts that a run trains on, or those that its versions are evaluated on."""
    task = config.task
    path = task.path if context == "training" else task.held_out_path
    made = f"{task.name} {task.dataset or ''} {task.dataset_options}".strip()
    name = (task.dataset or task.name) if path is None else Path(path).name
    content = hashlib.sha256()
    if path is not None and Path(path).is_file():
        with Path(path).open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
    else:
        made_of = [task.name, task.dataset, task.dataset_options, task.max_operations, task.length_decay, path]
        content.update(orjson.dumps([*made_of, config.seed if context == "training" else task.held_out]))
    return DataSet(name=name, digest=content.hexdigest(), source=path or made, context=context)


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Hash the prompts' texts, gold answers and rows, in order (SHA-256)."""
    content = hashlib.sha256()
    for prompt in prompts:
        content.update(f"{prompt.prompt_id} {prompt.answer}\n".encode())
        content.update(orjson.dumps(prompt.row, option=orjson.OPT_SORT_KEYS))
    return content.hexdigest()


def check_digests(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise ConfigError if a file yields other prompts than before. Both arguments are digests by setting."""
    for setting, digest in now.items():
        if before.get(setting, digest) != digest:
            raise ConfigError(
                f"{setting}: yields different prompts than when this run was started; restore the task's files, "
                "or start the run under another id"
            )


T = TypeVar("T")

SEED = 20250530  # of the held-out draws: the held-out set is the same for every run
_DRAWS = 200  # for each held-out prompt; one draw in ten is held out, so a task that needs more has too few prompts
HELD_OUT_SHARE = 0.1  # share of the hash space


def is_held_out(text: str) -> bool:
    """Whether this prompt is reserved for evaluation, decided only by its hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < HELD_OUT_SHARE * 2**64


def reserved(draws: Iterable[tuple[str, T]], count: int, fits: Callable[[T], bool] = lambda drawn: True) -> list[T]:
    """Return the draws with the first `count` distinct texts that are reserved and fit.
    Returns fewer if too many draws are alike."""
    found: dict[str, T] = {}
    for text, drawn in itertools.islice(draws, _DRAWS * count):
        if is_held_out(text) and text not in found and fits(drawn):
            found[text] = drawn
            if len(found) == count:
                break
    return list(found.values())
