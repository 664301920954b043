"""A benchmark: the held-out set of a task, and how its problems are sampled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import prompts_digest
from areal_core.environments.source import open_source
from areal_core.evaluation.sampling import Sampling
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark for one model."""

    name: str
    config: RunConfig
    problems: list[Prompt]
    about: dict[str, Any]  # what is evaluated, and how; other records are of another evaluation

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        return Sampling(
            samples=self.config.evaluation.samples or 0,
            temperature=self.config.evaluation.temperature,
            max_tokens=self.config.task.max_new_tokens,
            seed=self.config.seed,
            stop_token_ids=stop_token_ids,
        )

    def of(self, weights: str) -> Benchmark:
        """The same for a model whose weights have another hash."""
        return dataclasses.replace(self, about={**self.about, "model": {"digest": weights}})


def open_benchmark(name: str, config: RunConfig, tokenizer: Tokenizer, weights: str, *, engine: str) -> Benchmark:
    """The held-out set of a task for a model whose weights have the hash `weights`, served by `engine`.

    Raises what `open_source` raises."""
    problems = open_source(config, tokenizer).held_out()
    content = prompts_digest(problems)
    about = {
        "benchmark": {"name": name, "problems": len(problems), "sha256": content, "source": _source(config)},
        "model": {"digest": weights},
        "task": {"max_new_tokens": config.task.max_new_tokens, "chat": dataclasses.asdict(config.task.chat)},
        "environment": {"verifier": config.environment.verifier},
        "generation": {"engine": engine},
        "evaluation": {"samples": config.evaluation.samples, "temperature": config.evaluation.temperature},
        "seed": config.seed,
    }
    return Benchmark(name=name, config=config, problems=problems, about=about)


def _source(config: RunConfig) -> str:
    return config.task.held_out_path or f"{config.task.name} {config.task.dataset or ''}".strip()
