"""Benchmarks of an evaluation: from the words of a person to a configuration each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.run.folders import run_folder
from flows.compose import compose, quoted

EXPERIMENT = "_evaluation"  # a file of conf/experiment that is no choice of `make train`


def benchmark_configs(
    model: str,
    benchmarks: Sequence[str],
    *,
    samples: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, RunConfig]:
    """A configuration for each benchmark, by its name: a file of conf/task, whose held-out prompts it is, or name=path
    where these lie in a file. `model` is a folder, a GGUF file or the name of a run. Raises ConfigError."""
    given = {"evaluation.samples": samples, "seed": seed}
    common = [*overrides, *(f"{field}={value}" for field, value in given.items() if value is not None)]
    configs: dict[str, RunConfig] = {}
    for words in benchmarks:
        name, _, path = words.partition("=")
        if name in configs:
            raise ConfigError(f"benchmarks: {name} is there twice")
        file = [f"task.held_out_path={quoted(path)}"] if path else []
        configs[name] = compose(EXPERIMENT, [f"task={name}", *file, f"model.path={quoted(model)}", *common])
    if not configs:
        raise ConfigError("benchmarks: must name one at least, as in gsm8k=test.jsonl")
    return {name: _of_run(config) for name, config in configs.items()}


def _of_run(config: RunConfig) -> RunConfig:
    """Where the model is the name of a run, with that run's final model."""
    assert config.model.path is not None
    final = run_folder(config, config.model.path).root / "final"
    return replace(config, model=replace(config.model, path=str(final))) if os.path.isdir(final) else config
