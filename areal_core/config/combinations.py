"""Checks between the groups of a configuration. Each raises ConfigError in one line that names the field and says what
would be right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.config import algorithm
from areal_core.config.engines import TRAINING_ENGINES, TrainingTraits, known_generation, names
from areal_core.config.fields import check_length
from areal_core.config.groups import LoraConfig, TrainingConfig
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from areal_core.config.schema import RunConfig


_NAME_BYTES = 100  # a run's id has more: mode, date and a part that makes it unique


def check(config: RunConfig) -> None:
    check_length("name", config.name, _NAME_BYTES)
    _check_batch(config)
    _check_lengths(config)
    _check_task(config)
    _check_programs(config)
    algorithm.check(config.algorithm, max_new_tokens=config.task.max_new_tokens)
    _check_engines(config)
    _check_lora(config)
    _check_mode(config)
    _check_evaluation(config)
    if config.emulated:
        _check_emulated(config)
    if config.launch.accelerator == "cuda":
        servers = config.generation_servers * config.devices_per_server
        _check_devices(config, servers, f"({servers} GPUs generate")
    _check_hosts(config)


def _check_batch(config: RunConfig) -> None:
    """B is P groups of G, partitioned into minibatches that every rank has a share of."""
    batch, group = config.rollout.batch_size, config.algorithm.group_size
    if batch % group:
        raise ConfigError(f"rollout.batch_size: must be a multiple of algorithm.group_size ({group}), got {batch}")
    if config.training.minibatches > config.groups_per_batch:
        raise ConfigError(
            f"training.minibatches: must be at most {config.groups_per_batch}, the groups in a batch, "
            f"got {config.training.minibatches}"
        )
    completions = config.groups_per_batch // config.training.minibatches * group
    if config.trainer_processes > completions:
        raise ConfigError(
            f"training.ranks: must be at most {completions}, the completions in a minibatch, "
            f"got {config.trainer_processes}"
        )
    if config.rollout.dynamic_sampling and group == 1:
        raise ConfigError("algorithm.group_size: must be at least 2 with rollout.dynamic_sampling=true, got 1")


def _check_lengths(config: RunConfig) -> None:
    tokens = config.task.max_prompt_tokens + config.task.max_new_tokens
    if tokens > config.model.context:
        raise ConfigError(
            f"task.max_prompt_tokens: prompt and completion need {tokens} tokens (max_prompt_tokens + max_new_tokens), "
            f"more than model.context, {config.model.context}"
        )
    if config.training.microbatch_tokens < tokens:
        raise ConfigError(
            f"training.microbatch_tokens: must hold the longest trajectory, {tokens} tokens, "
            f"got {config.training.microbatch_tokens}"
        )


def _check_task(config: RunConfig) -> None:
    if config.task.name != "arithmetic" and config.model.path is None:
        raise ConfigError(
            f"model.path: task.name={config.task.name} needs a model; the embedded one only knows arithmetic"
        )
    if config.stop.score is not None and not config.evaluated and not config.emulated:
        raise ConfigError(f"stop.score: must be null with evaluation.enabled=false, got {config.stop.score}")


def _check_programs(config: RunConfig) -> None:
    """A group's verdicts are one after the other, and a worker that takes longer for them is taken for hung."""
    each = 2 * config.environment.program_wall_s  # a program that runs out of it is tried again
    needed = config.algorithm.group_size * each
    if config.environment.verifier == "code" and config.rollout.reward_timeout_s < needed:
        raise ConfigError(
            f"rollout.reward_timeout_s: must be at least {needed:g} with environment.verifier=code, which may take "
            f"{each:g} s (8 * environment.program_cpu_s) for each of "
            f"{config.algorithm.group_size} completions, got {config.rollout.reward_timeout_s:g}"
        )


def _check_engines(config: RunConfig) -> None:
    if config.emulated != TRAINING_ENGINES.get(config.training.engine, TrainingTraits()).emulates:
        wanted = names(TRAINING_ENGINES, "emulates", config.emulated)
        raise ConfigError(
            f"training.engine: must be {wanted} with generation.engine={config.generation.engine}, "
            f"got {config.training.engine!r}"
        )
    if config.training.zero_stage != TrainingConfig.zero_stage and not config.training_traits.shards:
        raise ConfigError(
            f"training.zero_stage: needs an engine whose ranks partition its state (training.engine="
            f"{names(TRAINING_ENGINES, 'shards')}), got {config.training.zero_stage} with "
            f"training.engine={config.training.engine}"
        )


def _check_lora(config: RunConfig) -> None:
    if (rank := config.training.lora.rank) is None:
        return
    if config.emulated:
        raise ConfigError(f"training.lora.rank: must be null where accelerators are emulated, got {rank}")
    linear = LoraConfig.targets.split(",")
    if config.model.path is None and (unknown := [name for name in config.training.lora.names if name not in linear]):
        raise ConfigError(
            f"training.lora.targets: must be of {', '.join(linear)}, the embedded model's linear layers, "
            f"got {unknown[0]!r}"
        )
    generation = config.generation
    if generation.interruption == "keep" and not known_generation(generation.engine).swaps_adapters:
        raise ConfigError(
            "generation.interruption: must be recompute, resubmit or wait with training.lora and "
            f"generation.engine={generation.engine}, whose requests keep the adapter that they began with, got 'keep'"
        )


def _check_mode(config: RunConfig) -> None:
    if config.generation.sleep and config.mode != "sync":
        raise ConfigError("generation.sleep: must be false with mode=async, where servers never stop, got true")
    if config.mode == "sync" and config.max_staleness != 0:
        raise ConfigError(f"rollout.max_staleness: must be 0 or null with mode=sync, got {config.max_staleness}")
    if config.pipeline_depth > config.max_staleness:
        eta = config.max_staleness
        raise ConfigError(f"rollout.pipeline_depth: must be at most max_staleness, {eta}, got {config.pipeline_depth}")


def _check_evaluation(config: RunConfig) -> None:
    if not config.evaluated:
        return
    evaluation, lent = config.evaluation, not config.evaluation.servers
    if lent and config.generation_servers < 2:
        raise ConfigError(
            "evaluation.servers: must be at least 1 with one generation server, which the run can't spare, got 0"
        )
    if config.scores_at_the_end:
        late = "with evaluation.servers=0 and generation.sleep=true, as versions are scored once the run has ended"
        if config.stop.score is not None:
            raise ConfigError(f"stop.score: must be null {late}, got {config.stop.score}")
        if config.training.keep_best:
            raise ConfigError(f"training.keep_best: must be false {late}, got true")
    if evaluation.accelerator != "cpu" and (lent or config.launch.accelerator == "cpu"):
        why = "evaluation.servers=0, whose servers are the run's" if lent else "launch.accelerator=cpu"
        raise ConfigError(f"evaluation.accelerator: must be cpu with {why}, got {evaluation.accelerator!r}")


def _check_emulated(config: RunConfig) -> None:
    for name, value in (
        ("algorithm.kl_coef", config.algorithm.kl_coef),
        ("algorithm.entropy_coef", config.algorithm.entropy_coef),
        ("rollout.dynamic_sampling", config.rollout.dynamic_sampling),
    ):
        if value:
            off = "false" if value is True else "0"
            got = "true" if value is True else f"{value:g}"
            raise ConfigError(f"{name}: must be {off} where accelerators are emulated and nothing is learnt, got {got}")
    if config.stop.score is not None:
        raise ConfigError(f"stop.score: must be null where accelerators are emulated, got {config.stop.score}")
    servers = config.generation_servers
    _check_devices(config, servers, f"where accelerators are emulated ({servers} generate")


def _check_devices(config: RunConfig, generating: int, who: str) -> None:
    """Unlike cores, accelerators are not shared at the same time: every server and rank has its own in asynchronous
    mode, and servers and ranks take turns on them in synchronous mode."""
    ranks = config.training_ranks
    scoring = config.evaluation_devices
    needed, link = (generating + ranks, "and") if config.mode == "async" else (max(generating, ranks), "then")
    if needed + scoring > config.launch.devices:
        beside = f", {scoring} score versions" if scoring else ""
        raise ConfigError(
            f"launch.devices: must be at least {needed + scoring} {who} {link} {ranks} train{beside}), "
            f"got {config.launch.devices}"
        )


def _check_hosts(config: RunConfig) -> None:
    hosts, ranks = config.training.hosts, config.trainer_processes
    if not config.launch.head_trains and ("trainer" not in config.remote_roles or config.provision.kind != "local"):
        raise ConfigError(
            "launch.head_trains: must be true unless machines that you start train (launch.remote_roles=trainer or "
            "both, provision=local), got false"
        )
    if hosts > 1 and "trainer" not in config.remote_roles:
        raise ConfigError(
            f"training.hosts: must be 1 unless other machines train (launch.remote_roles=trainer or both), got {hosts}"
        )
    if hosts == 1 and "trainer" in config.remote_roles and config.launch.head_trains:
        raise ConfigError(
            f"training.hosts: must be at least 2 with launch.remote_roles={config.launch.remote_roles}, where the head "
            "node is the first machine that trains (unless launch.head_trains=false), got 1"
        )
    if ranks % hosts:
        raise ConfigError(f"training.ranks: must be a multiple of training.hosts ({hosts}), got {ranks}")
    per_host = config.launch.devices_per_host
    if config.remote_roles and per_host is not None and config.ranks_per_host > per_host:
        raise ConfigError(
            f"training.hosts: must be at least {-(-ranks // per_host)}, so that no machine trains with more than its "
            f"launch.devices_per_host ({per_host}) GPUs, got {hosts}"
        )
