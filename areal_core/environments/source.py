"""Prompt sources: the training prompts and the held-out ones of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from areal_core.config.plugins import find
from areal_core.config.schema import RunConfig
from areal_core.environments.arithmetic import ArithmeticSource
from areal_core.environments.procedural import ProceduralSource
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


SOURCES: dict[str, Callable[[RunConfig, Tokenizer], PromptSource]] = {
    "arithmetic": ArithmeticSource,
    "rows": RowSource,
    "reasoning_gym": ProceduralSource,
}
