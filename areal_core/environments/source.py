"""Prompt sources: training and held-out prompts of one task, or of several tasks in given ratios."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from areal_core.config.fields import of_task
from areal_core.config.plugins import find
from areal_core.config.schema import RunConfig
from areal_core.environments.arithmetic import ArithmeticSource
from areal_core.environments.procedural import ProceduralSource
from areal_core.environments.row_source import RowSource
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt


class PromptSource(Protocol):
    """Prompts by index: a pure function of (seed, index), so that a checkpoint only has to save a cursor."""

    def prompt(self, index: int) -> Prompt:
        """The training prompt at `index`, for any index from 0 on; never a held-out prompt."""
        ...

    def held_out(self) -> list[Prompt]:
        """The evaluation prompts, the same for every seed."""
        ...


class MixedSource:
    """Prompts of several tasks in blocks. A block holds `ratio` prompts of each task, shuffled.

    The task at an index, and the index within that task's own source, are pure functions of (seed, index). The `index`
    of a prompt is its index in the mixture. Held-out prompts are those of all tasks, one task after the other.
    """

    def __init__(self, sources: Mapping[str, PromptSource], ratios: Mapping[str, int], seed: int) -> None:
        self.sources, self._ratios, self._seed = sources, ratios, seed
        self._block = [name for name in sorted(ratios) for _ in range(ratios[name])]
        self.digests = {
            f"tasks.{name}.{field}": found for name, its in sources.items() for field, found in digests(its).items()
        }

    def prompt(self, index: int) -> Prompt:
        block, place = divmod(index, len(self._block))
        order = random.Random(f"{self._seed}/mixture/{block}").sample(self._block, len(self._block))
        name = order[place]
        own = block * self._ratios[name] + order[:place].count(name)
        return replace(self.sources[name].prompt(own), index=index, task=name)

    def held_out(self) -> list[Prompt]:
        prompts = [replace(prompt, task=name) for name, its in self.sources.items() for prompt in its.held_out()]
        return [replace(prompt, index=index) for index, prompt in enumerate(prompts)]


def digests(source: PromptSource) -> dict[str, str]:
    """Digests of a source's prompts, by the setting that names their file; empty for generated prompts."""
    return getattr(source, "digests", {})


def dataset_report(source: PromptSource) -> dict[str, Any]:
    """Report the rows of a source's files, by task for a mixture; empty for generated prompts."""
    if isinstance(source, MixedSource):
        return {name: report for name, its in source.sources.items() if (report := dataset_report(its))}
    return dataclasses.asdict(source.report) if isinstance(source, RowSource) else {}


def open_source(
    config: RunConfig,
    tokenizer: Tokenizer,
    check: Callable[[RunConfig, Tokenizer, PromptSource], None] = lambda *_: None,
) -> PromptSource:
    """Open the source of the configured `task`, or a mixture of the configured `tasks`.

    Calls `check` with configuration, tokenizer and source of each task. Raises its errors, and ConfigError for prompts
    that are missing, malformed or too long.
    """
    sources: dict[str, PromptSource] = {}
    for name, its in config.by_task.items():
        with of_task(name):
            sources[name] = find("task.name", its.task.name, SOURCES)(its, tokenizer)
            check(its, tokenizer, sources[name])
    ratios = {name: mixed.ratio for name, mixed in config.tasks.items()}
    return MixedSource(sources, ratios, config.seed) if ratios else sources[""]


SOURCES: dict[str, Callable[[RunConfig, Tokenizer], PromptSource]] = {
    "arithmetic": ArithmeticSource,
    "rows": RowSource,
    "reasoning_gym": ProceduralSource,
}
