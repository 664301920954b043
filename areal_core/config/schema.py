"""The schema of a run: a dataclass of groups, and what follows from them.

A configuration holds causes; what follows from them is a property. Bounds stand beside the field as metadata, what must
hold within a group is its `check`, and between groups `areal_core.config.combinations`. `load` asks all of them; every
error is one line that names the dotted field. Nothing here knows of Hydra: `flows.compose` makes a plain dictionary and
hands it to `load`, as does `python -m areal_core`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from areal_core.config import combinations
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.config.engines import (
    GenerationTraits,
    TrainingTraits,
    generation_traits,
    known_generation,
    training_traits,
)
from areal_core.config.fields import LARGEST_SEED, bounded, build, choice
from areal_core.config.groups import (
    EmulationConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GenerationConfig,
    HealthConfig,
    LaunchConfig,
    MixedTask,
    ModelConfig,
    ProvisionConfig,
    RolloutConfig,
    StopConfig,
    StorageConfig,
    TaskConfig,
    TrackingConfig,
    TrainingConfig,
    WarmupConfig,
)

_GROUPS_PER_RANK = 4  # of a minibatch; with fewer, another core costs more in every update than it computes


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does."""

    name: str = "cpu"
    mode: str = choice("async", "async", "sync")
    seed: int = bounded(1, low=0, high=LARGEST_SEED)
    state_dir: str = ".areal"
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    # A mixture, by names: then `task` only says what the embedded model is warmed up on, and `environment` nothing.
    tasks: dict[str, MixedTask] = field(default_factory=dict[str, MixedTask], hash=False)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    provision: ProvisionConfig = field(default_factory=ProvisionConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)

    @property
    def label(self) -> str:
        """What runs of this configuration are called, the mode included."""
        prefix = "emulated-" if self.emulated and not self.name.startswith("emulated") else ""
        return f"{prefix}{self.name}-{self.mode}"

    def of(self, name: str) -> RunConfig:
        """The configuration of one task of the mixture; "" is the name of the only task of any other run."""
        if not name:
            return self
        return replace(self, task=self.tasks[name].task, environment=self.tasks[name].environment, tasks={})

    @property
    def by_task(self) -> dict[str, RunConfig]:
        """The configurations of all tasks, by name. Their order does not depend on that of the mixture's entries."""
        return {name: self.of(name) for name in sorted(self.tasks) or [""]}

    @property
    def task_label(self) -> str:
        """What people call the task, or the tasks of the mixture."""
        return ", ".join(self.tasks) or self.task.path or self.task.dataset or self.task.name

    @property
    def max_new_tokens(self) -> int:
        """Tokens of a trajectory after its prompt, at most: the largest of all tasks."""
        return max(its.task.max_new_tokens for its in self.by_task.values())

    @property
    def context(self) -> int:
        """Tokens of a prompt and its trajectory, at most: the largest of all tasks."""
        return max(its.task.max_prompt_tokens + its.task.max_new_tokens for its in self.by_task.values())

    @property
    def max_staleness(self) -> int:
        """eta of Eq. 3."""
        if self.rollout.max_staleness is not None:
            return self.rollout.max_staleness
        return 0 if self.mode == "sync" else 2

    @property
    def pipeline_depth(self) -> float:
        """How far ahead of training generation is to be, in batches; eta is how far it may be."""
        depth = self.rollout.pipeline_depth
        return self.max_staleness if depth is None else depth

    @property
    def emulated(self) -> bool:
        """Whether accelerators are emulated: their time passes, nothing is generated or learnt."""
        return known_generation(self.generation.engine).emulates

    @property
    def generation_traits(self) -> GenerationTraits:
        """Capabilities of the generation engine. Raises ConfigError for an import path that can't be imported."""
        return generation_traits("generation.engine", self.generation.engine)

    @property
    def evaluation_traits(self) -> GenerationTraits:
        """Those of the engine that scores versions."""
        field = "evaluation.engine" if self.evaluation.servers else "generation.engine"
        return generation_traits(field, self.evaluation_engine)

    @property
    def training_traits(self) -> TrainingTraits:
        """Capabilities of the training engine. Raises ConfigError for an import path that can't be imported."""
        return training_traits(self.training.engine)

    @property
    def zero_stage(self) -> int:
        """What ranks partition (ZeRO): 0 nothing, 1 moments, 2 gradients too, 3 weights too."""
        return self.training.zero_stage if self.training_traits.shards else 0

    @property
    def evaluated(self) -> bool:
        """Whether versions are scored; emulated training has learnt nothing that could be."""
        return self.evaluation.enabled and not self.emulated

    @property
    def evaluation_engine(self) -> str:
        """The engine that scores versions."""
        return self.evaluation.engine if self.evaluation.servers else self.generation.engine

    @property
    def evaluation_servers(self) -> int:
        """Processes that serve the evaluator alone. It steps one embedded engine on a core itself: requests between two
        processes would cost as much again as their tokens."""
        its = self.evaluation
        itself = its.servers == 1 and its.accelerator == "cpu" and known_generation(its.engine).in_process
        return 0 if itself else its.servers

    @property
    def emulated_cluster(self) -> str | None:
        """The emulated cluster, for people; None where nothing is emulated."""
        if not self.emulated:
            return None
        its = self.emulation
        devices = self.launch.devices * its.replicas * its.tensor_parallel
        return (
            f"{its.model} on {devices} {its.accelerator}, {its.speed:g} s in one, {its.tokens_per_token} tokens as one"
        )

    @property
    def takes_turns(self) -> bool:
        """Whether servers and ranks take turns on the same devices, rather than each on its own."""
        return self.mode == "sync" and self.generation_servers + self.training_ranks > self.launch.devices

    @property
    def recomputes_proximal(self) -> bool:
        """Whether pi_prox takes a forward pass of its own. Where nothing is stale, a batch trains the policy that
        sampled it. Then pi_behav is pi_prox, and Eq. 5 is PPO. The pass is made all the same where both are compared,
        to bound the difference between servers and trainer."""
        stale = self.max_staleness > 0 or self.algorithm.bounds_weights
        return self.algorithm.takes_proximal and stale

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes the prompt of a group once for all of its completions. On GPUs one kernel
        attends to sequences of any lengths, and knows no shared prompts."""
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
    def remote_roles(self) -> frozenset[str]:
        """Roles that remote workers run."""
        return {"none": frozenset[str](), "both": frozenset(("generation", "trainer"))}.get(
            self.launch.remote_roles, frozenset((self.launch.remote_roles,))
        )

    @property
    def admits_machines(self) -> bool:
        """Whether other machines may join the run: then the head node has a data server."""
        return bool(self.remote_roles) or not ip_address(self.launch.address).is_loopback

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
        devices = self.launch.devices - self.evaluation_devices
        if self.mode == "async" and not self.shares_cores:
            devices -= self.training_ranks
        return max(1, devices // self.devices_per_server)

    @property
    def completions_per_server(self) -> int:
        """Completions worth having in flight at one server: what it decodes at once, and a group that waits, from which
        slots are refilled as completions end."""
        return self.generation.slots + self.algorithm.group_size

    @property
    def devices_per_server(self) -> int:
        """GPUs of one generation server; 1 on cores."""
        return self._devices_of(self.generation.engine)

    @property
    def evaluation_devices(self) -> int:
        """GPUs of the evaluator's own servers."""
        gpus = self.evaluated and self.evaluation.accelerator == "cuda"
        return self.evaluation.servers * self._devices_of(self.evaluation.engine) if gpus else 0

    def _devices_of(self, engine: str) -> int:
        vllm = self.generation.vllm
        return vllm.tensor_parallel * vllm.data_parallel if known_generation(engine).own_server else 1

    @property
    def interruption(self) -> str:
        """What an update does to running completions. Synchronous training has none when it updates."""
        return self.generation.interruption if self.mode == "async" else "wait"

    @property
    def sleeps(self) -> bool:
        """Whether servers release their accelerators while the trainer trains."""
        return self.generation.sleep and self.mode == "sync"

    @property
    def scores_at_the_end(self) -> bool:
        """Whether versions are scored once the run has ended: a server that is lent, and so awake, would be in the way
        of ranks that train on its accelerators."""
        return self.evaluated and self.sleeps and not self.evaluation.servers

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(values: Mapping[str, Any]) -> RunConfig:
    """Build and check a configuration from nested plain values.

    Raises ConfigError with one line that starts with the dotted field, for unknown fields, wrong types, values out
    of bounds and combinations that can't work.
    """
    config = build(RunConfig, values)
    combinations.check(config)
    return config


def load_file(path: str | Path) -> RunConfig:
    """Load the resolved configuration that a run keeps in its folder (JSON)."""
    return load(json.loads(Path(path).read_text()))
