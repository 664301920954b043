"""Checks between the groups of a configuration.

Each raises ConfigError in one line that names the field and says which values are allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.config import algorithm
from areal_core.config.engines import TRAINING_ENGINES, TrainingTraits, known_generation, names
from areal_core.config.fields import check_length, of_task, require
from areal_core.config.groups import LoraConfig, TrainingConfig
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from areal_core.config.schema import RunConfig


_NAME_BYTES = 100  # a run id adds the mode, the date and a unique suffix


def check(config: RunConfig) -> None:
    check_length("name", config.name, _NAME_BYTES)
    algorithm.check(config.algorithm, max_new_tokens=config.max_new_tokens)
    for name, its in config.by_task.items():
        with of_task(name):
            _check(its)


def _check(config: RunConfig) -> None:
    """Check a run of one task."""
    _check_batch(config)
    _check_lengths(config)
    _check_task(config)
    _check_programs(config)
    _check_engines(config)
    _check_lora(config)
    _check_mode(config)
    _check_evaluation(config)
    servers = config.generation_servers
    if config.emulated:
        _check_devices(config, servers, f"where accelerators are emulated ({servers} generate")
    if config.launch.accelerator == "cuda":
        gpus = servers * config.devices_per_server
        _check_devices(config, gpus, f"({gpus} GPUs generate")
    _check_hosts(config)


def _check_batch(config: RunConfig) -> None:
    """Check that B is P groups of G, and that minibatches have completions for every rank."""
    batch, group, groups = config.rollout.batch_size, config.algorithm.group_size, config.groups_per_batch
    require(batch % group == 0, "rollout.batch_size", f"a multiple of algorithm.group_size ({group})", batch)
    minibatches = config.training.minibatches
    require(minibatches <= groups, "training.minibatches", f"at most {groups}, the groups in a batch", minibatches)
    completions, ranks = groups // minibatches * group, config.trainer_processes
    require(ranks <= completions, "training.ranks", f"at most {completions}, the completions in a minibatch", ranks)


def _check_lengths(config: RunConfig) -> None:
    tokens, held = config.context, config.training.microbatch_tokens
    if tokens > config.model.context:
        raise ConfigError(
            f"task.max_prompt_tokens: prompt and completion need {tokens} tokens (max_prompt_tokens + max_new_tokens), "
            f"more than model.context, {config.model.context}"
        )
    wanted = f"at least {tokens} tokens, as the longest trajectory"
    require(held >= tokens, "training.microbatch_tokens", wanted, held)


def _check_task(config: RunConfig) -> None:
    name, path = config.task.name, config.model.path
    wanted = f"set with task.name={name}, because the embedded model only supports arithmetic"
    require(name == "arithmetic" or path is not None, "model.path", wanted, path)
    scored, score = config.evaluated, config.stop.score
    require(scored or score is None, "stop.score", "null when no version is evaluated", score)


def _check_programs(config: RunConfig) -> None:
    """Check that reward_timeout_s leaves time for slow programs, so that no busy worker counts as hung."""
    if config.environment.verifier != "code":
        return
    each = 2 * config.environment.program_wall_s  # a timed-out program is tried again
    wanted = f"at least {each:g} (8 * environment.program_cpu_s) with environment.verifier=code"
    require(
        config.rollout.reward_timeout_s >= each, "rollout.reward_timeout_s", wanted, config.rollout.reward_timeout_s
    )


def _check_engines(config: RunConfig) -> None:
    engine, stage = config.training.engine, config.training.zero_stage
    wanted = f"{names(TRAINING_ENGINES, 'emulates', config.emulated)} with generation.engine={config.generation.engine}"
    emulates = TRAINING_ENGINES.get(engine, TrainingTraits()).emulates
    require(config.emulated == emulates, "training.engine", wanted, engine)
    default = TrainingConfig.zero_stage
    wanted = f"{default}, the default, with training.engine={engine}, which does not shard training state"
    require(stage == default or config.training_traits.shards, "training.zero_stage", wanted, stage)


def _check_lora(config: RunConfig) -> None:
    if (rank := config.training.lora.rank) is None:
        return
    require(not config.emulated, "training.lora.rank", "null where accelerators are emulated", rank)
    linear = LoraConfig.targets.split(",")
    for name in config.training.lora.names if config.model.path is None else ():
        wanted = f"of {', '.join(linear)}, the embedded model's linear layers"
        require(name in linear, "training.lora.targets", wanted, name)
    its = config.generation
    wanted = (
        f"recompute, resubmit or wait with training.lora and generation.engine={its.engine}, whose requests keep the "
        "adapter that they began with"
    )
    swaps = its.interruption != "keep" or known_generation(its.engine).swaps_adapters
    require(swaps, "generation.interruption", wanted, its.interruption)


def _check_mode(config: RunConfig) -> None:
    eta, depth = config.max_staleness, config.pipeline_depth
    if config.mode == "sync":
        require(eta == 0, "rollout.max_staleness", "0 or null with mode=sync", eta)
    else:
        sleep = config.generation.sleep
        require(not sleep, "generation.sleep", "false with mode=async, where servers never stop", sleep)
    require(depth <= eta, "rollout.pipeline_depth", f"at most max_staleness, {eta}", depth)


def _check_evaluation(config: RunConfig) -> None:
    if not config.evaluated:
        return
    evaluation, lent, score = config.evaluation, not config.evaluation.servers, config.stop.score
    wanted = "at least 1 with generation.servers=1, because 0 borrows a generation server and would leave none"
    require(not lent or config.generation_servers > 1, "evaluation.servers", wanted, evaluation.servers)
    if config.scores_at_the_end:
        late = "with evaluation.servers=0 and generation.sleep=true, because versions are then scored after training"
        require(score is None, "stop.score", f"null {late}", score)
    shared = lent or config.launch.accelerator == "cpu"
    why = "evaluation.servers=0, which borrows the run's servers" if lent else "launch.accelerator=cpu"
    own = evaluation.accelerator == "cpu" or not shared
    require(own, "evaluation.accelerator", f"cpu with {why}", evaluation.accelerator)


def _check_devices(config: RunConfig, generating: int, who: str) -> None:
    """Check that there are enough devices.
    Accelerators, unlike cores, are not shared at the same time. In asynchronous mode every server and rank has its own.
    In synchronous mode they take turns."""
    ranks, scoring = config.training_ranks, config.evaluation_devices
    needed, link = (generating + ranks, "and") if config.mode == "async" else (max(generating, ranks), "then")
    beside = f", {scoring} evaluate" if scoring else ""
    wanted = f"at least {needed + scoring} {who} {link} {ranks} train{beside})"
    require(needed + scoring <= config.launch.devices, "launch.devices", wanted, config.launch.devices)


def _check_hosts(config: RunConfig) -> None:
    hosts, ranks, remote = config.training.hosts, config.trainer_processes, "trainer" in config.remote_roles
    head_trains, started_by_hand = config.launch.head_trains, config.provision.kind == "local"
    wanted = (
        "true unless machines that you start run the trainer (launch.remote_roles=trainer or both, provision=local)"
    )
    require(head_trains or (remote and started_by_hand), "launch.head_trains", wanted, head_trains)
    wanted = "1 unless other machines run the trainer (launch.remote_roles=trainer or both)"
    require(remote or hosts == 1, "training.hosts", wanted, hosts)
    wanted = (
        f"at least 2 with launch.remote_roles={config.launch.remote_roles}, where the head node is the first machine "
        "that trains (unless launch.head_trains=false)"
    )
    require(not (remote and head_trains) or hosts > 1, "training.hosts", wanted, hosts)
    require(ranks % hosts == 0, "training.ranks", f"a multiple of training.hosts ({hosts})", ranks)
    per_host = config.launch.devices_per_host
    if config.remote_roles and per_host is not None:
        wanted = f"at least {-(-ranks // per_host)}, as each machine has launch.devices_per_host={per_host} GPUs"
        require(config.ranks_per_host <= per_host, "training.hosts", wanted, hosts)
