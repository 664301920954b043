"""Sample the base model with a run's own prompts, environment and sampling settings, before it trains."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import psutil

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ConfigError
from areal_core.evaluation import tryout
from areal_core.models.spec import read_spec
from areal_core.planning.footprint import check_footprint, completion_bytes, server_state, training_pass, training_state
from areal_core.run.evaluation import Result, evaluate
from areal_core.run.folders import Log, base_model
from areal_core.run.preflight import device_memory

_GIB = 2**30
_PROCESS = 0.4 * _GIB  # Python, torch and numba of one process


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a try."""

    figures: tryout.Tryout
    result: Result  # its records hold the prompts exactly as they are fed; its page shows all rollouts
    memory: str
    problems: list[tuple[bool, str]]  # True: learning is impossible


def try_out(config: RunConfig, *, prompts: int, log: Log) -> Report:
    """Sample one group of rollouts for each of the first training `prompts`, and judge them.
    Raises the errors of `evaluation.evaluate`."""
    sampled = replace(config.evaluation, samples=config.algorithm.group_size, temperature=config.generation.temperature)
    asked = load(replace(config, evaluation=sampled, tracking=replace(config.tracking, enabled=False)).to_dict())
    [result] = evaluate({"prompts": asked}, name=f"try-{secrets.token_hex(3)}", prompts=prompts, log=log)
    folder = base_model(config, log)
    figures = tryout.judge(result.records)
    memory, problem = _memory(config, str(folder))
    return Report(
        figures=figures,
        result=result,
        memory=memory,
        problems=[*([(True, problem)] if problem else []), *figures.problems(config)],
    )


def _memory(config: RunConfig, folder: str) -> tuple[str, str | None]:
    """The memory that the run needs, as text, and why it does not fit."""
    spec = read_spec(folder)
    if config.launch.accelerator == "cuda":
        try:
            plan = check_footprint(config, spec, device_memory(config))
        except ConfigError as error:
            return "see below", str(error)
        return plan.table(), None
    rank = sum((training_state(config, spec) | training_pass(config, spec)).values()) + _PROCESS
    slots = config.generation.slots * completion_bytes(config, spec)
    server = sum(server_state(config, spec).values()) + slots + _PROCESS
    needed = config.training_ranks * rank + config.generation_servers * server
    free = psutil.virtual_memory().available
    said = f"about {needed / _GIB:.1f} GiB of {free / _GIB:.1f} GiB free"
    if needed <= free:
        return said, None
    return said, f"generation.slots: the run needs {said}; lower it, training.microbatch_tokens or launch.devices"
