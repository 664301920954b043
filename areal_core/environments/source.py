"""Prompt sources: the training prompts and the held-out ones of a task."""

from __future__ import annotations

from typing import Protocol

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


def open_source(config: RunConfig, tokenizer: Tokenizer) -> PromptSource:
    """The source that `task` names. Raises ConfigError for prompts that are missing, malformed or too long."""
    task = config.task
    if task.name == "arithmetic":
        return ArithmeticSource(
            tokenizer,
            seed=config.seed,
            max_operations=task.max_operations,
            decay=task.length_decay,
            held_out=task.held_out,
            max_prompt_tokens=task.max_prompt_tokens,
        )
    if task.name == "reasoning_gym":
        return ProceduralSource(task, tokenizer, seed=config.seed)
    return RowSource(task, tokenizer, verifier=verifier_name(config.environment, task), seed=config.seed)
