"""The schema of a run: dataclasses, their bounds, and the one place where they are checked.

A configuration holds causes; what follows from them is a property. Bounds stand beside the field as metadata and are
checked by `load` (areal_core.config.fields), which names the dotted field in its one-line error. Nothing here knows of
Hydra: `flows.compose` makes a plain dictionary and hands it to `load`, as does `python -m areal_core`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.config import algorithm
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.config.fields import bounded, build, choice
from areal_core.config.groups import (
    EmulationConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GenerationConfig,
    LaunchConfig,
    ModelConfig,
    RolloutConfig,
    StopConfig,
    StorageConfig,
    TaskConfig,
    TrackingConfig,
    TrainingConfig,
    VllmConfig,
    WarmupConfig,
)
from areal_core.errors import ConfigError

__all__ = [
    "AlgorithmConfig",
    "EmulationConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LaunchConfig",
    "ModelConfig",
    "RolloutConfig",
    "RunConfig",
    "StopConfig",
    "StorageConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainingConfig",
    "VllmConfig",
    "WarmupConfig",
    "load",
    "load_file",
]

_GROUPS_PER_RANK = 4  # of a minibatch; with fewer, another core costs more in every update than it computes
_VLLM_TEMPERATURE = 2.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does."""

    name: str = "cpu"
    mode: str = choice("async", "async", "sync")
    seed: int = bounded(1, low=0)
    state_dir: str = ".areal"
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)

    @property
    def label(self) -> str:
        """What runs of this configuration are called, the mode included."""
        prefix = "emulated-" if self.emulated and not self.name.startswith("emulated") else ""
        return f"{prefix}{self.name}-{self.mode}"

    @property
    def max_staleness(self) -> int:
        """eta of Eq. 3."""
        if self.rollout.max_staleness is not None:
            return self.rollout.max_staleness
        return 0 if self.mode == "sync" else 2

    @property
    def emulated(self) -> bool:
        """Whether accelerators are emulated: their time passes, nothing is generated or learnt."""
        return self.generation.engine == "emulated"

    @property
    def evaluated(self) -> bool:
        """Whether versions are scored; what accelerators only take their time for has learnt nothing."""
        return self.evaluation.enabled and not self.emulated

    @property
    def emulated_cluster(self) -> str | None:
        """What is emulated, for people; None where nothing is."""
        if not self.emulated:
            return None
        its, devices = self.emulation, self.launch.devices * self.emulation.tensor_parallel
        return (
            f"{its.model} on {devices} {its.accelerator}, {its.speed:g} s in one, {its.tokens_per_token} tokens as one"
        )

    @property
    def recomputes_proximal(self) -> bool:
        """Whether pi_prox takes a forward pass of its own. Where nothing is stale, the policy that sampled a batch is
        the one that it trains: pi_behav is pi_prox, and Eq. 5 is PPO; unless the two are compared to bound what servers
        and trainer differ in."""
        stale = self.max_staleness > 0 or self.algorithm.bounds_weights
        return self.algorithm.takes_proximal and stale

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes the prompt of a group once for all of its answers. On GPUs sequences of any
        lengths are attended to by one kernel, which knows no shared prompts."""
        return self.launch.accelerator == "cpu" and not self.emulated

    @property
    def groups_per_batch(self) -> int:
        """P = B / G."""
        return self.rollout.batch_size // self.algorithm.group_size

    @property
    def shares_cores(self) -> bool:
        """Whether servers and ranks are on the same cores at the same time: training when a batch waits, generation
        otherwise. In sync mode they take turns by themselves."""
        return self.mode == "async" and self.launch.accelerator == "cpu" and not self.emulated

    @property
    def training_ranks(self) -> int:
        """As set; else all devices in sync mode. In async mode 1 on GPUs, and on cores as many as have work enough in a
        minibatch."""
        if self.training.ranks is not None:
            return self.training.ranks
        if self.shares_cores:
            groups = self.groups_per_batch // self.training.minibatches
            return max(1, min(self.launch.devices, groups // _GROUPS_PER_RANK))
        return self.launch.devices if self.mode == "sync" else 1

    @property
    def trainer_processes(self) -> int:
        """One a rank; a single one stands for all emulated ranks."""
        return 1 if self.emulated else self.training_ranks

    @property
    def elsewhere(self) -> frozenset[str]:
        """Roles whose processes other machines run."""
        return {"none": frozenset[str](), "both": frozenset(("generation", "trainer"))}.get(
            self.launch.elsewhere, frozenset((self.launch.elsewhere,))
        )

    @property
    def ranks_per_host(self) -> int:
        """Trainer processes of one of `training.hosts` machines."""
        return self.trainer_processes // self.training.hosts

    @property
    def token_rate(self) -> float:
        """Tokens a second of the emulated cluster for each that is seen here; 1 where nothing is emulated."""
        return self.emulation.tokens_per_token / self.emulation.speed if self.emulated else 1.0

    @property
    def generation_servers(self) -> int:
        if self.generation.servers is not None:
            return self.generation.servers
        all_devices = self.mode == "sync" or self.shares_cores
        devices = self.launch.devices if all_devices else self.launch.devices - self.training_ranks
        return max(1, devices // self.devices_per_server)

    @property
    def answers_per_server(self) -> int:
        """Worth having in flight at one server: more than it decodes at once, as those of a group that have ended
        count until all of them have."""
        return 2 * self.generation.slots

    @property
    def devices_per_server(self) -> int:
        """GPUs of one generation server; a core is never shared out further."""
        vllm = self.generation.vllm
        return vllm.tensor_parallel * vllm.data_parallel if self.generation.engine == "vllm" else 1

    @property
    def interruption(self) -> str:
        """What an update does to running answers. Synchronous training has none when it updates."""
        return self.generation.interruption if self.mode == "async" else "wait"

    @property
    def sleeps(self) -> bool:
        """Whether servers give their accelerators back while the trainer trains."""
        return self.generation.sleep and self.mode == "sync"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(values: Mapping[str, Any]) -> RunConfig:
    """Build and check a configuration from nested plain values.

    Raises ConfigError with one line that starts with the dotted field, for unknown fields, wrong types, values out
    of bounds and combinations that can't work.
    """
    config = build(RunConfig, values)
    _check_combinations(config)
    return config


def load_file(path: str | Path) -> RunConfig:
    """Load the resolved configuration that a run keeps in its folder (JSON)."""
    return load(json.loads(Path(path).read_text()))


def _check_combinations(config: RunConfig) -> None:
    batch, group = config.rollout.batch_size, config.algorithm.group_size
    if batch % group:
        raise ConfigError(f"rollout.batch_size: must be a multiple of algorithm.group_size ({group}), got {batch}")
    if config.training.minibatches > config.groups_per_batch:
        raise ConfigError(
            f"training.minibatches: must be at most {config.groups_per_batch}, the groups in a batch, "
            f"got {config.training.minibatches}"
        )
    groups_per_minibatch = config.groups_per_batch // config.training.minibatches
    if config.trainer_processes > groups_per_minibatch:
        raise ConfigError(
            f"training.ranks: must be at most {groups_per_minibatch}, the groups in a minibatch, "
            f"got {config.trainer_processes}"
        )
    _check_sampling(config.generation)
    if config.generation.engine == "vllm" and group > config.generation.slots:
        raise ConfigError(
            f"generation.slots: must be at least algorithm.group_size ({group}) with generation.engine=vllm, which "
            f"decodes all answers of a request at once, got {config.generation.slots}"
        )
    algorithm.check(config.algorithm, max_new_tokens=config.task.max_new_tokens)
    if config.rollout.dynamic_sampling and group == 1:
        raise ConfigError("algorithm.group_size: must be at least 2 with rollout.dynamic_sampling=true, got 1")
    if config.emulated != (config.training.engine == "emulated"):
        wanted = "emulated" if config.emulated else "torch"
        raise ConfigError(
            f"training.engine: must be {wanted} with generation.engine={config.generation.engine}, "
            f"got {config.training.engine!r}"
        )
    if config.training.engine != "deepspeed" and config.training.zero_stage != TrainingConfig.zero_stage:
        raise ConfigError(
            f"training.zero_stage: needs training.engine=deepspeed, got {config.training.zero_stage} with "
            f"training.engine={config.training.engine}"
        )
    if config.emulated:
        _check_emulated(config)
    if config.stop.score is not None and not config.evaluated:
        raise ConfigError(f"stop.score: must be null with evaluation.enabled=false, got {config.stop.score}")
    if config.launch.accelerator == "cuda":
        _check_gpus(config)
    elif config.generation.transfer != "files":
        raise ConfigError(
            f"generation.transfer: must be files with launch.accelerator=cpu, got {config.generation.transfer!r}"
        )
    _check_hosts(config)
    if config.generation.sleep and config.mode != "sync":
        raise ConfigError("generation.sleep: must be false with mode=async, where servers never stop, got true")
    if config.mode == "sync" and config.max_staleness != 0:
        raise ConfigError(f"rollout.max_staleness: must be 0 or null with mode=sync, got {config.max_staleness}")
    model = config.model
    if model.hidden_size % (2 * model.heads):
        raise ConfigError(
            f"model.hidden_size: must be a multiple of 2 * model.heads ({2 * model.heads}), got {model.hidden_size}"
        )
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.kv_heads: must divide model.heads ({model.heads}), got {model.kv_heads}")
    tokens = config.task.max_prompt_tokens + config.task.max_new_tokens
    if tokens > model.context:
        raise ConfigError(
            f"task.max_prompt_tokens: prompt and answer need {tokens} tokens (max_prompt_tokens + max_new_tokens), "
            f"more than model.context, {model.context}"
        )
    if config.training.microbatch_tokens < tokens:
        raise ConfigError(
            f"training.microbatch_tokens: must hold the longest trajectory, {tokens} tokens, "
            f"got {config.training.microbatch_tokens}"
        )
    if config.task.name == "jsonl" and not (config.task.path and config.task.held_out_path):
        missing = "task.held_out_path" if config.task.path else "task.path"
        raise ConfigError(f"{missing}: task.name=jsonl needs a file of prompts, one JSON object a line")
    if config.task.name == "jsonl" and config.model.path is None:
        raise ConfigError("model.path: task.name=jsonl needs a model folder; the embedded model only knows arithmetic")


def _check_sampling(generation: GenerationConfig) -> None:
    for name, value, off in (("top_p", generation.top_p, (1.0,)), ("top_k", generation.top_k, (0, -1))):
        if value not in off:
            raise ConfigError(
                f"generation.{name}: must be {off[0]:g}, got {value}; the trainer gives every token a probability, and "
                "can't say what one that was cut off would have had"
            )
    if generation.transfer != "files" and generation.engine != "vllm":
        raise ConfigError(
            f"generation.transfer: must be files with generation.engine={generation.engine}, "
            f"got {generation.transfer!r}"
        )
    if generation.transfer != "files" and generation.vllm.python is not None:
        raise ConfigError(
            f"generation.vllm.python: must be null with generation.transfer={generation.transfer}: the trainer sends "
            f"weights with vLLM's own code; got {generation.vllm.python!r}"
        )
    if generation.engine == "vllm" and generation.temperature > _VLLM_TEMPERATURE:
        raise ConfigError(
            f"generation.temperature: vLLM takes {_VLLM_TEMPERATURE:g} at most, got {generation.temperature:g}"
        )
    try:
        shlex.split(generation.vllm.arguments)
    except ValueError as error:
        raise ConfigError(f"generation.vllm.arguments: {error}, in {generation.vllm.arguments!r}") from None


def _check_hosts(config: RunConfig) -> None:
    try:
        usable = not ipaddress.ip_address(config.launch.address).is_unspecified  # others are told it
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"launch.address: must be an IP address of this machine, got {config.launch.address!r}")
    hosts, ranks = config.training.hosts, config.trainer_processes
    if hosts > 1 and "trainer" not in config.elsewhere:
        raise ConfigError(
            f"training.hosts: must be 1 unless other machines train (launch.elsewhere=trainer or both), got {hosts}"
        )
    if ranks % hosts:
        raise ConfigError(f"training.ranks: must be a multiple of training.hosts ({hosts}), got {ranks}")
    per_host = config.launch.devices_per_host
    if config.elsewhere and per_host is not None and config.ranks_per_host > per_host:
        raise ConfigError(
            f"training.hosts: must be at least {-(-ranks // per_host)}, so that no machine trains with more than its "
            f"launch.devices_per_host ({per_host}) GPUs, got {hosts}"
        )
    if config.elsewhere and config.generation.transfer != "files":
        raise ConfigError(
            f"generation.transfer: must be files with launch.elsewhere={config.launch.elsewhere}, "
            f"got {config.generation.transfer!r}"
        )


def _check_gpus(config: RunConfig) -> None:
    servers = config.generation_servers * config.devices_per_server
    _check_devices(config, servers, f"({servers} GPUs generate")
    wanted = {"nccl": "async", "ipc": "sync"}.get(config.generation.transfer, config.mode)
    if config.mode != wanted:
        raise ConfigError(
            f"generation.transfer: nccl needs servers and trainer on different GPUs (mode=async), ipc on the same "
            f"(mode=sync); got {config.generation.transfer!r} with mode={config.mode}"
        )


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
    """Unlike cores, accelerators are shared by nobody: every server and rank has its own in asynchronous mode, and
    takes turns on them in synchronous mode."""
    ranks = config.training_ranks
    needed, link = (generating + ranks, "and") if config.mode == "async" else (max(generating, ranks), "then")
    if needed > config.launch.devices:
        raise ConfigError(
            f"launch.devices: must be at least {needed} {who} {link} {ranks} train), got {config.launch.devices}"
        )
