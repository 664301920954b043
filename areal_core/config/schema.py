"""The schema of a run: a dataclass of groups, and derived properties.

A configuration holds independent settings; derived values are properties. Bounds are metadata of a field. `check` of a
group holds conditions within it, `areal_core.config.combinations` those between groups. `load` checks all of them.
Every error is one line that names the dotted field. Hydra is unknown here: `flows.compose` and `python -m areal_core`
pass a plain dictionary to `load`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from areal_core.config import combinations, engines, groups
from areal_core.config.algorithm import AlgorithmConfig
from areal_core.config.fields import LARGEST_SEED, bounded, build, choice

_GROUPS_PER_RANK = 4  # groups per minibatch; with fewer, another rank costs more per update than it computes


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    name: str = "cpu"
    mode: str = choice("async", "async", "sync")
    seed: int = bounded(1, low=0, high=LARGEST_SEED)
    state_dir: str = ".areal"
    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    task: groups.TaskConfig = field(default_factory=groups.TaskConfig)
    environment: groups.EnvironmentConfig = field(default_factory=groups.EnvironmentConfig)
    # A mixture, by task name. Then `task` only configures the embedded model's warm-up, and `environment` is unused.
    tasks: dict[str, groups.MixedTask] = field(default_factory=dict[str, groups.MixedTask], hash=False)
    warmup: groups.WarmupConfig = field(default_factory=groups.WarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    generation: groups.GenerationConfig = field(default_factory=groups.GenerationConfig)
    rollout: groups.RolloutConfig = field(default_factory=groups.RolloutConfig)
    training: groups.TrainingConfig = field(default_factory=groups.TrainingConfig)
    evaluation: groups.EvaluationConfig = field(default_factory=groups.EvaluationConfig)
    storage: groups.StorageConfig = field(default_factory=groups.StorageConfig)
    tracking: groups.TrackingConfig = field(default_factory=groups.TrackingConfig)
    stop: groups.StopConfig = field(default_factory=groups.StopConfig)
    health: groups.HealthConfig = field(default_factory=groups.HealthConfig)
    launch: groups.LaunchConfig = field(default_factory=groups.LaunchConfig)
    provision: groups.ProvisionConfig = field(default_factory=groups.ProvisionConfig)
    emulation: groups.EmulationConfig = field(default_factory=groups.EmulationConfig)

    @property
    def label(self) -> str:
        """Name prefix of runs of this configuration, including the mode."""
        prefix = "emulated-" if self.emulated and not self.name.startswith("emulated") else ""
        return f"{prefix}{self.name}-{self.mode}"

    def of(self, name: str) -> RunConfig:
        """The configuration of one task of the mixture; "" is the only task of a run without a mixture."""
        if not name:
            return self
        return replace(self, task=self.tasks[name].task, environment=self.tasks[name].environment, tasks={})

    @property
    def by_task(self) -> dict[str, RunConfig]:
        """The configurations of all tasks, by name, sorted by name."""
        return {name: self.of(name) for name in sorted(self.tasks) or [""]}

    @property
    def task_label(self) -> str:
        """Display name of the task, or of the tasks of the mixture."""
        return ", ".join(self.tasks) or self.task.path or self.task.dataset or self.task.name

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a trajectory after its prompt, over all tasks."""
        return max(its.task.max_new_tokens for its in self.by_task.values())

    @property
    def context(self) -> int:
        """Most tokens of a prompt with its trajectory, over all tasks."""
        return max(its.task.max_prompt_tokens + its.task.max_new_tokens for its in self.by_task.values())

    @property
    def max_staleness(self) -> int:
        """eta of Eq. 3, in versions."""
        if self.rollout.max_staleness is not None:
            return self.rollout.max_staleness
        return 0 if self.mode == "sync" else 2

    @property
    def pipeline_depth(self) -> float:
        """How many batches generation runs ahead of training; at most eta."""
        depth = self.rollout.pipeline_depth
        return self.max_staleness if depth is None else depth

    @property
    def emulated(self) -> bool:
        """Whether accelerators are emulated: their time passes, but nothing is generated or learnt."""
        return engines.known_generation(self.generation.engine).emulates

    @property
    def generation_traits(self) -> engines.GenerationTraits:
        """Capabilities of the generation engine. Raises ConfigError if an import path can't be imported."""
        return engines.generation_traits("generation.engine", self.generation.engine)

    @property
    def evaluation_traits(self) -> engines.GenerationTraits:
        """Capabilities of the engine that scores versions. Raises ConfigError as `generation_traits` does."""
        field = "evaluation.engine" if self.evaluation.servers else "generation.engine"
        return engines.generation_traits(field, self.evaluation_engine)

    @property
    def training_traits(self) -> engines.TrainingTraits:
        """Capabilities of the training engine. Raises ConfigError if an import path can't be imported."""
        name = self.training.engine
        return engines.traits_of("training.engine", name, engines.TRAINING_ENGINES, engines.TrainingTraits())

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage. Ranks partition: 0 nothing, 1 moments, 2 also gradients, 3 also model weights."""
        return self.training.zero_stage if self.training_traits.shards else 0

    @property
    def evaluated(self) -> bool:
        """Whether versions are scored; never for emulated training, which learns nothing."""
        return self.evaluation.enabled and not self.emulated

    @property
    def evaluation_engine(self) -> str:
        """The engine that scores versions."""
        return self.evaluation.engine if self.evaluation.servers else self.generation.engine

    @property
    def evaluation_servers(self) -> int:
        """Number of server processes for the evaluator alone.
        It is 0 if the evaluator steps one embedded engine itself: requests between processes would double the cost."""
        its = self.evaluation
        itself = its.servers == 1 and its.accelerator == "cpu" and engines.known_generation(its.engine).in_process
        return 0 if itself else its.servers

    @property
    def emulated_cluster(self) -> str | None:
        """Description of the emulated cluster; None if nothing is emulated."""
        if not self.emulated:
            return None
        its = self.emulation
        devices = self.launch.devices * its.replicas * its.tensor_parallel
        return (
            f"{its.model} on {devices} {its.accelerator}, {its.speed:g} s in one, {its.tokens_per_token} tokens as one"
        )

    @property
    def takes_turns(self) -> bool:
        """Whether servers and ranks take turns on the same devices."""
        return self.mode == "sync" and self.generation_servers + self.training_ranks > self.launch.devices

    @property
    def recomputes_proximal(self) -> bool:
        """Whether a separate forward pass computes pi_prox.

        Without staleness, a batch trains the policy that sampled it. Then pi_behav is pi_prox, and Eq. 5 is PPO. The
        pass still runs if the importance weights are bounded, to bound the difference between servers and trainer.
        """
        stale = self.max_staleness > 0 or self.algorithm.bounds_weights
        return self.algorithm.takes_proximal and stale

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes the prompt of a group once for all of its completions.
        On GPUs, the attention kernel takes sequences of any lengths, but no shared prompts."""
        return self.launch.accelerator == "cpu" and not self.emulated

    @property
    def groups_per_batch(self) -> int:
        """P = B / G."""
        return self.rollout.batch_size // self.algorithm.group_size

    @property
    def shares_cores(self) -> bool:
        """Whether servers and ranks use the same cores at the same time.
        The cores train when a batch is ready, and generate otherwise. In sync mode the two take turns anyway."""
        return self.mode == "async" and self.launch.accelerator == "cpu" and not self.emulated

    @property
    def training_ranks(self) -> int:
        """Number of ranks: as set, else all devices in sync mode.
        The default in async mode is 1 on GPUs. On cores it is the number of ranks that a minibatch keeps busy."""
        if self.training.ranks is not None:
            return self.training.ranks
        if self.shares_cores:
            groups = self.groups_per_batch // self.training.minibatches
            return max(1, min(self.launch.devices, groups // _GROUPS_PER_RANK))
        return self.launch.devices if self.mode == "sync" else 1

    @property
    def trainer_processes(self) -> int:
        """Number of trainer processes: one per rank; a single one stands for all emulated ranks."""
        return 1 if self.emulated else self.training_ranks

    @property
    def remote_roles(self) -> frozenset[str]:
        """Roles that remote workers run."""
        roles = {"none": (), "both": ("generation", "trainer")}
        return frozenset(roles.get(self.launch.remote_roles, (self.launch.remote_roles,)))

    @property
    def admits_machines(self) -> bool:
        """Whether other machines may join the run; then the head node has a data server."""
        return bool(self.remote_roles) or not ip_address(self.launch.address).is_loopback

    @property
    def ranks_per_host(self) -> int:
        """Trainer processes on each of `training.hosts` machines."""
        return self.trainer_processes // self.training.hosts

    @property
    def token_rate(self) -> float:
        """Emulated tokens per second for each token per second measured here; 1 without emulation."""
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
        """Completions to keep in flight at one server: all slots, and a waiting group to refill them."""
        return self.generation.slots + self.algorithm.group_size

    @property
    def devices_per_server(self) -> int:
        """GPUs per generation server; 1 on cores."""
        return self._devices_of(self.generation.engine)

    @property
    def evaluation_devices(self) -> int:
        """GPUs of the evaluator's own servers."""
        gpus = self.evaluated and self.evaluation.accelerator == "cuda"
        return self.evaluation.servers * self._devices_of(self.evaluation.engine) if gpus else 0

    def _devices_of(self, engine: str) -> int:
        vllm = self.generation.vllm
        return vllm.tensor_parallel * vllm.data_parallel if engines.known_generation(engine).own_server else 1

    @property
    def interruption(self) -> str:
        """Effect of an update on running completions; synchronous training has none at that time."""
        return self.generation.interruption if self.mode == "async" else "wait"

    @property
    def sleeps(self) -> bool:
        """Whether servers free their accelerators during training."""
        return self.generation.sleep and self.mode == "sync"

    @property
    def scores_at_the_end(self) -> bool:
        """Whether versions are scored after the end of the run.
        A borrowed server is awake, and would occupy memory that ranks need on its accelerators."""
        return self.evaluated and self.sleeps and not self.evaluation.servers

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(values: Mapping[str, Any]) -> RunConfig:
    """Build and check a configuration from nested plain values.

    Raises ConfigError with one line that starts with the dotted field, for unknown fields, wrong types, values out of
    bounds and impossible combinations.
    """
    config = build(RunConfig, values)
    combinations.check(config)
    return config


def load_file(path: str | Path) -> RunConfig:
    """Load the resolved configuration in a run's folder (JSON)."""
    return load(json.loads(Path(path).read_text()))
