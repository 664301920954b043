"""A benchmark: the held-out set of a task, and how its problems are sampled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from areal_core.config.schema import RunConfig
from areal_core.environments.datasets import prompts_digest
from areal_core.environments.source import open_source
from areal_core.models.tokenizer import Tokenizer
from areal_core.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One benchmark for one model. `config` says how its problems are sampled."""

    name: str
    config: RunConfig
    problems: list[Prompt]
    about: dict[str, Any]  # what is evaluated, and how; other records are of another evaluation


def open_benchmark(name: str, config: RunConfig, tokenizer: Tokenizer, weights: str, *, engine: str) -> Benchmark:
    """The held-out set of a task for a model whose weights have the hash `weights`, served by `engine`.

    Raises what `open_source` raises."""
    problems = open_source(config, tokenizer).held_out()
    source = config.task.held_out_path or f"{config.task.name} {config.task.dataset or ''}".strip()
    described = {"name": name, "problems": len(problems), "sha256": prompts_digest(problems), "source": source}
    about = {
        "benchmark": described,
        "model": {"digest": weights},
        "task": {"max_new_tokens": config.task.max_new_tokens, "chat": dataclasses.asdict(config.task.chat)},
        "environment": {"verifier": config.environment.verifier},
        "generation": {"engine": engine},
        "evaluation": {"samples": config.evaluation.samples, "temperature": config.evaluation.temperature},
        "seed": config.seed,
    }
    return Benchmark(name=name, config=config, problems=problems, about=about)
