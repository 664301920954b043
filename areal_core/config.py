"""The schema of a run: dataclasses, their bounds, and the one place where they are checked.

A configuration holds causes; what follows from them is a property. Bounds stand beside the field as metadata and are
checked by `load`, which names the dotted field in its one-line error. Nothing here knows of Hydra: `flows.compose`
makes a plain dictionary and hands it to `load`, as does `python -m areal_core`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.errors import ConfigError

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def _bounded(default: Any, *, low: float | None = None, high: float | None = None, above: float | None = None) -> Any:
    """A number with `low <= value <= high`, or `value > above`."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base policy: a folder in the transformers format, or the embedded model that the warm-up makes."""

    path: str | None = None  # None: make and warm up the embedded model from the shape below
    hidden_size: int = _bounded(64, low=8)
    layers: int = _bounded(3, low=1)
    heads: int = _bounded(4, low=1)
    kv_heads: int = _bounded(4, low=1)
    intermediate_size: int = _bounded(192, low=8)
    context: int = _bounded(160, low=16)  # tokens, prompt and answer together


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Prompts and how answers to them are limited."""

    name: str = _choice("arithmetic", "arithmetic", "jsonl")
    max_operations: int = _bounded(16, low=1, high=64)  # arithmetic: longest chain
    length_decay: float = _bounded(0.85, above=0.0, high=1.0)  # arithmetic: P(n+1 operations) / P(n)
    path: str | None = None  # jsonl: training prompts
    held_out_path: str | None = None  # jsonl: held-out prompts
    prompt_field: str = "question"
    answer_field: str = "answer"
    held_out: int = _bounded(1024, low=1)  # prompts
    max_prompt_tokens: int = _bounded(40, low=1)
    max_new_tokens: int = _bounded(112, low=1)


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised warm-up of the embedded model: first worked solutions, then mostly direct answers."""

    seed: int = _bounded(0, low=0)
    worked_steps: int = _bounded(1200, low=0)
    worked_batch: int = _bounded(16, low=1)
    direct_steps: int = _bounded(200, low=0)
    direct_batch: int = _bounded(32, low=1)
    direct_share: float = _bounded(0.8, low=0.0, high=1.0)
    learning_rate: float = _bounded(2e-3, above=0.0)  # peak, worked solutions
    direct_learning_rate: float = _bounded(5e-4, above=0.0)  # peak, direct answers; more would undo the first stage


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """The objective (paper, Eq. 5) and the advantages that it weighs."""

    objective: str = _choice("decoupled", "decoupled", "naive")
    advantage: str = _choice("group", "group", "batch", "leave_one_out")
    group_size: int = _bounded(16, low=1)  # G, answers to one prompt
    clip_eps: float = _bounded(0.2, above=0.0)
    behaviour_cap: float | None = _bounded(None, above=0.0)  # upper bound on pi_prox / pi_behav; None: none
    truncated: str = _choice("wrong", "wrong", "mask")  # what becomes of an answer that was cut off
    reward_correct: float = 1.0
    reward_wrong: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The engine behind the generation servers."""

    engine: str = _choice("embedded", "embedded", "emulated")
    servers: int | None = _bounded(None, low=1)  # None: every device in sync mode, else those that do not train
    slots: int = _bounded(128, low=1)  # answers decoded at once by one server
    interruptible: bool = True  # False: an update waits until running answers are finished
    deterministic: bool = False  # the same tokens for the same seed whatever else is in the batch


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Admission, the staleness bound (Eq. 3) and what happens to failures and stragglers."""

    batch_size: int = _bounded(512, low=1)  # B, trajectories a step
    max_staleness: int | None = _bounded(None, low=0)  # eta; None: 0 in sync mode, else 2
    policy: str = _choice("admit", "admit", "wait", "drop")
    max_tries: int = _bounded(3, low=1)  # requests and scorings of one group before it is dropped
    max_requeues: int = _bounded(2, low=0)  # times that a prompt dropped as stale is queued again
    request_timeout_s: float = _bounded(120.0, above=0.0)
    reward_timeout_s: float = _bounded(20.0, above=0.0)
    reward_workers: int = _bounded(1, low=1)
    retain: str = _choice("uncommitted", "uncommitted", "all")  # payloads kept after a committed checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimiser, how a batch is cut and how often the state is saved."""

    engine: str = _choice("torch", "torch", "emulated")
    steps: int = _bounded(25, low=1)
    ranks: int | None = _bounded(None, low=1)  # data-parallel processes; None: every device in sync mode, else 1
    minibatches: int = _bounded(4, low=1)  # PPO minibatches a step, cut by whole groups
    learning_rate: float = _bounded(5e-5, above=0.0)
    warmup_steps: int = _bounded(0, low=0)  # optimiser steps of linear learning-rate warm-up
    weight_decay: float = _bounded(0.0, low=0.0)
    beta1: float = _bounded(0.9, low=0.0, high=0.9999)
    beta2: float = _bounded(0.95, low=0.0, high=0.99999)
    adam_eps: float = _bounded(1e-5, above=0.0)
    grad_clip: float = _bounded(1.0, above=0.0)
    microbatch_tokens: int = _bounded(8192, low=1)  # C of Algorithm 1
    min_microbatches: int = _bounded(1, low=1)  # k_min of Algorithm 1
    checkpoint_every: int = _bounded(10, low=1)  # steps
    keep_checkpoints: int = _bounded(2, low=1)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    every: int = _bounded(5, low=1)  # steps between two evaluations; the base and the last version always count
    slots: int = _bounded(128, low=1)


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Where checkpoints and the final model go."""

    url: str = ".areal/storage"  # a folder, file://... or s3://bucket/prefix
    endpoint_url: str | None = None  # S3 servers other than Amazon's


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    enabled: bool = True
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else SQLite in the state folder
    experiment: str = "areal"
    table_every: int = _bounded(5, low=1)  # steps between two tables of sampled trajectories and staleness pictures
    flush_timeout_s: float = _bounded(60.0, above=0.0)


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """What ends a run before its last step."""

    score: float | None = _bounded(None, low=0.0, high=1.0)  # held-out accuracy
    minutes: float | None = _bounded(None, above=0.0)  # of RL wall time


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Processes and what is expected of them."""

    devices: int = _bounded(2, low=1)  # cores (or GPUs) that generate and train
    pin: bool = True  # give generation and training cores of their own in async mode
    generation_nice: int = _bounded(0, low=0, high=19)  # where it shares cores with training
    evaluator_nice: int = _bounded(5, low=0, high=19)
    restarts: int = _bounded(2, low=0)  # per process
    start_timeout_s: float = _bounded(120.0, above=0.0)
    stall_timeout_s: float = _bounded(300.0, above=0.0)  # a run without a new step for so long has failed
    stop_timeout_s: float = _bounded(15.0, above=0.0)


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Accelerators that take their time and compute nothing, where both engines are `emulated`; see docs/emulation.md.
    Times and lengths are those of the emulated cluster. A device of `launch.devices` is one replica of the model."""

    accelerator: str = _choice("h800", "a100", "h800", "h200")
    model: str = _choice("qwen-1.5b", "qwen-1.5b", "qwen-7b", "qwen-14b", "qwen-32b")
    tensor_parallel: int = _bounded(1, low=1)  # accelerators of one replica
    speed: float = _bounded(100.0, above=0.0)  # emulated seconds in a real one
    tokens_per_token: int = _bounded(128, low=1)  # real tokens that one token of prompts and answers stands for
    length_median: float = _bounded(7360.0, above=0.0, high=1e7)  # tokens of an answer, log-normal, before the limit
    length_sigma: float = _bounded(0.8, low=0.0, high=5.0)
    lengths_path: str | None = None  # recorded lengths instead: a file of whole numbers
    decode_overhead_s: float = _bounded(0.0168, low=0.0)  # of a decode step, whatever the batch: a fitted residual
    bandwidth_share: float = _bounded(0.8, above=0.0, high=1.0)  # of the memory bandwidth, in decoding
    memory_share: float = _bounded(0.7, above=0.0, high=1.0)  # of the memory, for weights and KV cache
    prefill_share: float = _bounded(0.5, above=0.0, high=1.0)  # of the peak arithmetic
    training_share: float = _bounded(0.43, above=0.0, high=1.0)
    transfer_bytes_per_s: float = _bounded(50e9, above=0.0)  # of new weights into one accelerator
    handover_s: float = _bounded(1.0, low=0.0)  # that a replica stands still for new weights, async mode
    switch_s: float = _bounded(5.0, low=0.0)  # between generating and training on the same accelerators, each way


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides what a run does."""

    name: str = "cpu"
    mode: str = _choice("async", "async", "sync")
    seed: int = _bounded(1, low=0)
    state_dir: str = ".areal"
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
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
        the one that it trains: pi_behav is pi_prox, and Eq. 5 is PPO."""
        return self.algorithm.objective == "decoupled" and self.max_staleness > 0

    @property
    def groups_per_batch(self) -> int:
        """P = B / G."""
        return self.rollout.batch_size // self.algorithm.group_size

    @property
    def training_ranks(self) -> int:
        if self.training.ranks is not None:
            return self.training.ranks
        return self.launch.devices if self.mode == "sync" else 1

    @property
    def trainer_processes(self) -> int:
        """One a rank; a single one stands for all emulated ranks."""
        return 1 if self.emulated else self.training_ranks

    @property
    def token_rate(self) -> float:
        """Tokens a second of the emulated cluster for each that is seen here; 1 where nothing is emulated."""
        return self.emulation.tokens_per_token / self.emulation.speed if self.emulated else 1.0

    @property
    def generation_servers(self) -> int:
        if self.generation.servers is not None:
            return self.generation.servers
        if self.mode == "sync":
            return self.launch.devices
        return max(1, self.launch.devices - self.training_ranks)

    @property
    def interruptible(self) -> bool:
        """Synchronous training never interrupts: nothing runs while it trains."""
        return self.generation.interruptible and self.mode == "async"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(values: Mapping[str, Any]) -> RunConfig:
    """Build and check a configuration from nested plain values.

    Raises ConfigError with one line that starts with the dotted field, for unknown fields, wrong types, values out
    of bounds and combinations that can't work.
    """
    config = _build(RunConfig, values, "")
    _check_combinations(config)
    return config


def load_file(path: str | Path) -> RunConfig:
    """Load the resolved configuration that a run keeps in its folder (JSON)."""
    return load(json.loads(Path(path).read_text()))


def merge(base: Mapping[str, Any], dotted: str, value: Any, above: str = "") -> dict[str, Any]:
    """A copy of `base` with the nested field `dotted` set to `value`; `above` is the prefix of the names in `base`."""
    head, _, rest = dotted.partition(".")
    merged = dict(base)
    if rest:
        below = merged.get(head, {})
        if not isinstance(below, Mapping):
            raise ConfigError(f"{above}{dotted}: {above}{head} is a value, not a group of fields")
        merged[head] = merge(typing.cast(Mapping[str, Any], below), rest, value, f"{above}{head}.")
    else:
        merged[head] = value
    return merged


def _build(schema: type[Any], values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'configuration'}: expected a group of fields, got {values!r}")
    given = typing.cast(Mapping[str, Any], values)
    hints = typing.get_type_hints(schema)
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key in given:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known fields: {', '.join(fields)}"
            raise ConfigError(f"{prefix}{key}: no such field{hint}")
    built: dict[str, Any] = {}
    for key, value in given.items():
        name = prefix + key
        if dataclasses.is_dataclass(hints[key]):
            built[key] = _build(typing.cast(type[Any], hints[key]), value, name + ".")
        else:
            built[key] = _check(name, _coerce(name, value, hints[key]), fields[key].metadata)
    return schema(**built)


def _coerce(name: str, value: Any, hint: Any) -> Any:
    options: Sequence[Any] = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is float and isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)  # YAML 1.1 takes 1e-4 for text
    if isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    kinds = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    optional = " or null" if type(None) in options else ""
    raise ConfigError(f"{name}: must be {kinds[wanted]}{optional}, got {value!r}")


def _check(name: str, value: Any, bounds: Mapping[str, Any]) -> Any:
    if value is None:
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: must be finite, got {value}")
    choices = bounds.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{name}: must be one of {', '.join(choices)}, got {value!r}")
    low, high, above = bounds.get("low"), bounds.get("high"), bounds.get("above")
    if low is not None and value < low:
        raise ConfigError(f"{name}: must be at least {low}, got {value}")
    if above is not None and value <= above:
        raise ConfigError(f"{name}: must be greater than {above}, got {value}")
    if high is not None and value > high:
        raise ConfigError(f"{name}: must be at most {high}, got {value}")
    return value


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
    if group == 1 and config.algorithm.advantage in ("group", "leave_one_out"):
        raise ConfigError(
            f"algorithm.group_size: must be at least 2 with algorithm.advantage={config.algorithm.advantage}, got 1"
        )
    if config.emulated != (config.training.engine == "emulated"):
        wanted = "emulated" if config.emulated else "torch"
        raise ConfigError(
            f"training.engine: must be {wanted} with generation.engine={config.generation.engine}, "
            f"got {config.training.engine!r}"
        )
    if config.emulated:
        _check_emulated(config)
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


def _check_emulated(config: RunConfig) -> None:
    """Nothing confines emulated devices: every server and rank has one to itself, so there must be enough of them."""
    if config.stop.score is not None:
        raise ConfigError(f"stop.score: must be null where accelerators are emulated, got {config.stop.score}")
    servers, ranks = config.generation_servers, config.training_ranks
    needed, link = (servers + ranks, "and") if config.mode == "async" else (max(servers, ranks), "then")
    if needed > config.launch.devices:
        raise ConfigError(
            f"launch.devices: must be at least {needed} where accelerators are emulated ({servers} generate {link} "
            f"{ranks} train), got {config.launch.devices}"
        )
