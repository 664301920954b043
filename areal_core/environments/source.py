"""Prompt sources: the training prompts and the held-out ones of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from areal_core.config.plugins import find
from areal_core.config.schema import RunConfig
from areal_core.environments.arithmetic import ArithmeticSource
from areal_core.environments.procedural import ProceduralSource
from areal_core.environments.registry import verifier_name
from areal_core.environments.row_source import RowSource
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt


class PromptSource(Protocol):
    """Prompts by index: a pure function of (seed, index), so that a cursor is all there is to save."""

    def prompt(self, index: int) -> Prompt:
        """The training prompt at `index`, any index from 0 on; never one that is held out."""
        ...

    def held_out(self) -> list[Prompt]:
        """The evaluation prompts: the same for every seed."""
        ...


def digests(source: PromptSource) -> dict[str, str]:
    """Digests of a source's prompts, by the setting that names their file; none where prompts come from no file."""
    return getattr(source, "digests", {})


def open_source(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    """The source that `task` names. Raises ConfigError for prompts that are missing, malformed or too long."""
    return find("task.name", config.task.name, SOURCES)(config, tokenizer)


def _arithmetic(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    task = config.task
    return ArithmeticSource(
        tokenizer,
        seed=config.seed,
        max_operations=task.max_operations,
        decay=task.length_decay,
        held_out=task.held_out,
        max_prompt_tokens=task.max_prompt_tokens,
    )


def _rows(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    verifier = verifier_name(config.environment, config.task)
    return RowSource(config.task, tokenizer, verifier=verifier, seed=config.seed)


def _reasoning_gym(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    return ProceduralSource(config.task, tokenizer, seed=config.seed)


SOURCES: dict[str, Callable[[RunConfig, Tokenizer], PromptSource]] = {
    "arithmetic": _arithmetic,
    "rows": _rows,
    "reasoning_gym": _reasoning_gym,
}
