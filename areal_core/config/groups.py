"""The groups of a configuration: all fields with defaults and bounds, and checks within a group.

`areal_core.config.fields` checks the bounds. The algorithm's group is in `areal_core.config.algorithm`.
"""

from __future__ import annotations

import ipaddress
import shlex
from dataclasses import dataclass, field

from areal_core.config.engines import GENERATION_ENGINES, TRAINING_ENGINES, known_generation
from areal_core.config.fields import LARGEST_SEED, bounded, check_length, choice, refuse_credentials, require
from areal_core.config.plugins import check_name
from areal_core.errors import ConfigError
from areal_core.types import Lora

TASKS = {  # task -> verifier that fits its gold answers
    "arithmetic": "exact_match",
    "rows": "mathematics",
    "reasoning_gym": "reasoning_gym",
}
MLFLOW_CREDENTIALS = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_EXPERIMENT_BYTES = 250  # MLflow's databases allow 256 characters


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base model: a transformers folder, a model of the Hub, a GGUF file, or the embedded model.
    The embedded model is made by the warm-up."""

    # A folder, hub:owner/name@revision, or a .gguf file; None: make the embedded model of the shape below.
    path: str | None = None
    hidden_size: int = bounded(64, low=8)
    layers: int = bounded(3, low=1)
    heads: int = bounded(4, low=1)
    kv_heads: int = bounded(4, low=1)
    intermediate_size: int = bounded(192, low=8)
    context: int = bounded(160, low=16)  # tokens, prompt and completion together

    def check(self) -> None:
        width, heads = self.hidden_size, self.heads
        require(width % (2 * heads) == 0, "model.hidden_size", f"a multiple of 2 * model.heads ({2 * heads})", width)
        require(heads % self.kv_heads == 0, "model.kv_heads", f"a divisor of model.heads ({heads})", self.kv_heads)


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Prompts as chat messages, in the format of the model's own chat template."""

    enabled: bool = False  # false: prompts are used unchanged
    system: str | None = None  # system prompt; None: the template's default
    thinking: bool | None = None  # the template's `enable_thinking`; None: its default


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Prompts, and length limits of prompts and completions."""

    name: str = "arithmetic"  # one of TASKS, or an import path: package.module:name
    max_operations: int = bounded(16, low=1, high=64)  # arithmetic: longest chain
    length_decay: float = bounded(0.85, above=0.0, high=1.0)  # arithmetic: P(n+1 operations) / P(n)
    dataset: str | None = None  # reasoning_gym: name of a data set
    dataset_options: str = ""  # reasoning_gym: name=value pairs for the data set, in shell syntax
    # rows, see docs/data.md: .jsonl, .json or .parquet
    path: str | None = None  # training prompts; None: only evaluation is possible
    held_out_path: str | None = None
    prompt_field: str = "question"  # dots for nested fields: extra.question
    answer_field: str = "answer"  # the gold answer, in the format of environment.verifier
    prompt_template: str | None = None  # Jinja over the row's fields; None: the value of prompt_field
    held_out_prompt_field: str | None = None  # None: as in the training file; also for the next two fields
    held_out_answer_field: str | None = None
    held_out_prompt_template: str | None = None
    chat: ChatConfig = field(default_factory=ChatConfig)
    held_out: int = bounded(1024, low=1)  # prompts
    max_prompt_tokens: int = bounded(40, low=1)
    max_new_tokens: int = bounded(112, low=1)  # per trajectory after its prompt, over all turns

    @property
    def trains(self) -> bool:
        """Whether the task has prompts to train on."""
        return self.name != "rows" or self.path is not None

    def check(self) -> None:
        check_name("task.name", self.name, TASKS)
        if self.name == "reasoning_gym" and not self.dataset:
            raise ConfigError("task.dataset: must name a data set of reasoning-gym with task.name=reasoning_gym")
        if self.name == "rows" and not self.held_out_path:
            raise ConfigError("task.held_out_path: must name a file of prompts for evaluation with task.name=rows")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model as verifier (environment.verifier=judge). Limits apply to each reward worker."""

    url: str | None = None  # URL of an OpenAI-compatible server: https://api.openai.com/v1
    model: str = ""
    key_variable: str = "AREAL_JUDGE_KEY"  # environment variable with the API key, if needed
    prompt: str = (  # Jinja over task, row, answer (the gold answer), completion
        "Question:\n{{ task.text }}\n\nReference answer:\n{{ answer }}\n\nAnswer to be judged:\n{{ completion }}\n\n"
        "Reply with a number from 0 (wrong) to 1 (right), and nothing else."
    )
    max_tokens: int = bounded(16, low=1)  # tokens of its response, which must end with the score
    at_once: int = bounded(16, low=1)  # parallel requests
    requests_per_s: float | None = bounded(None, above=0.0)  # None: no limit
    tries: int = bounded(4, low=1)
    timeout_s: float = bounded(60.0, above=0.0)  # time limit of a request
    dollars_per_million_read: float = bounded(0.0, low=0.0)  # per million prompt tokens, for the cost curve
    dollars_per_million_written: float = bounded(0.0, low=0.0)

    def check(self) -> None:
        refuse_credentials("environment.judge.url", self.url, self.key_variable)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The environment between a prompt and its rewards; names are registered or package.module:name."""

    name: str = "single_turn"  # single_turn, two_turn, calculator, or an import path
    verifier: str | None = None  # registered, or an import path; None: default of task.name
    rewards: str = ""  # more reward functions with coefficients, comma-separated: package.module:name=0.5
    max_no_result: float = bounded(0.2, low=0.0, high=1.0)  # the run ends above this fraction of rollouts of 32 groups
    verify_truncated: bool = False  # false: truncated completions are incorrect
    retry_message: str = "="  # two_turn: message after an incorrect first try
    retry_score: float = bounded(0.5, low=0.0, high=1.0)  # two_turn: score of a correct second try
    sandbox: str = choice("bubblewrap", "bubblewrap", "none")  # confines programs and verifiers; none disables it
    program_cpu_s: float = bounded(10.0, low=0.5, high=3600.0)  # code: CPU time of one program over all its tests
    program_memory_mib: int = bounded(1024, low=64, high=2**20)  # code: memory shared by all processes of a program
    program_processes: int = bounded(8, low=1, high=4096)  # code: concurrent processes and threads of a program
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def judged_by(self) -> str:
        """Name of the verifier in error messages."""
        return f"environment.verifier {self.verifier}" if self.verifier else "the task's verifier"

    @property
    def program_wall_s(self) -> float:
        """Wall-time limit of a program in seconds; leaves it its CPU time even on a busy core."""
        return 4 * self.program_cpu_s


@dataclass(frozen=True, kw_only=True)
class MixedTask:
    """One task of a mixture, with its ratio."""

    ratio: int = bounded(1, low=1, high=1000)  # prompts of this task per block; a block has sum(ratios) prompts
    task: TaskConfig = field(default_factory=TaskConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised warm-up of the embedded model: first worked solutions, then mostly direct answers."""

    seed: int = bounded(0, low=0, high=LARGEST_SEED)
    worked_steps: int = bounded(1200, low=0)
    worked_batch: int = bounded(16, low=1)
    direct_steps: int = bounded(200, low=0)


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM's own server, for generation.engine=vllm."""

    python: str | None = None  # interpreter of vLLM's environment; None: this one
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")  # auto: float32 on a CPU, else the model's
    tensor_parallel: int = bounded(1, low=1)  # GPUs per replica
    data_parallel: int = bounded(1, low=1)  # replicas behind one server
    memory_share: float = bounded(0.85, above=0.0, high=1.0)  # share of a GPU's memory
    kv_cache_gib: int = bounded(1, low=1)  # KV cache size on a CPU
    arguments: str = ""  # more command-line arguments, in shell syntax


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The engine of the generation servers."""

    engine: str = "embedded"  # one of GENERATION_ENGINES, or an import path: package.module:function
    servers: int | None = bounded(None, low=1)  # None: one per device, except GPUs that train in async mode
    slots: int = bounded(32, low=1)  # completions that one server decodes at once: as many as a core's caches hold
    interruption: str = choice("recompute", "recompute", "resubmit", "keep", "wait")  # how updates treat completions
    temperature: float = bounded(1.0, low=0.01, high=100.0)  # sampling temperature; the trainer's policy uses it too
    sleep: bool = False  # synchronous mode: servers free their accelerators during training
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def check(self) -> None:
        check_name("generation.engine", self.engine, GENERATION_ENGINES)
        most = known_generation(self.engine).max_temperature
        wanted = f"at most {most:g} with engine={self.engine}"
        require(self.temperature <= most, "generation.temperature", wanted, self.temperature)
        try:
            shlex.split(self.vllm.arguments)
        except ValueError as error:
            said = f"must be in shell syntax, got {self.vllm.arguments!r}: {error}"
            raise ConfigError(f"generation.vllm.arguments: {said}") from None


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Admission, the staleness bound (Eq. 3), and handling of failures and stragglers."""

    batch_size: int = bounded(512, low=1)  # B, trajectories per step
    max_staleness: int | None = bounded(None, low=0)  # eta; None: 0 in sync mode, else 2
    pipeline_depth: float | None = bounded(None, low=0.0)  # batches started ahead of the one in training; None: eta
    batch_selection: str = choice("wait", "wait", "admit", "drop")  # groups taken; see docs/architecture.md
    dynamic_sampling: bool = False  # replace zero-variance groups by other prompts
    max_zero_variance_groups: int = bounded(1024, low=1)  # consecutive zero-variance groups before the run fails
    max_tries: int = bounded(3, low=1)  # requests and scorings of one group before it is dropped
    max_requeues: int = bounded(2, low=0)  # times that a prompt dropped as stale is queued again
    request_timeout_s: float = bounded(120.0, above=0.0)
    reward_timeout_s: float = bounded(20.0, above=0.0)
    deadline_s: float | None = bounded(None, above=0.0)  # per rollout, since its group's admission; None: no limit
    reward_workers: int = bounded(1, low=1)
    retain: str = choice("uncommitted", "uncommitted", "all")  # payloads kept after a committed checkpoint


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A LoRA adapter, trained and published instead of the model weights, which stay the base model's."""

    rank: int | None = bounded(None, low=1, high=512)  # None: no adapter, all model weights are trained
    alpha: float = bounded(32.0, above=0.0)  # the adapter's output is scaled by alpha / rank
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # linear layers, comma-separated

    @property
    def names(self) -> tuple[str, ...]:
        """The layer names in `targets`."""
        return tuple(name.strip() for name in self.targets.split(","))

    @property
    def adapter(self) -> Lora | None:
        """The form of the adapter; None without an adapter."""
        return None if self.rank is None else Lora(rank=self.rank, alpha=self.alpha, targets=self.names)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimiser, the partition of a batch, and checkpoints."""

    engine: str = "torch"  # one of TRAINING_ENGINES, or an import path: package.module:function
    steps: int = bounded(25, low=1)
    zero_stage: int = bounded(2, low=0, high=3)  # deepspeed: ranks partition 1 moments, 2 + gradients, 3 + weights
    dtype: str = choice("float32", "float32", "bfloat16")  # of passes over the model; optimiser state is float32
    checkpoint_activations: bool = False  # keep only layer inputs; recompute in the backward pass
    ranks: int | None = bounded(None, low=1)  # data-parallel processes; None: see RunConfig.training_ranks
    hosts: int = bounded(1, low=1)  # machines with ranks, the head node first
    # PPO minibatches per step, of whole groups; the completions of each are partitioned over the ranks.
    minibatches: int = bounded(4, low=1)
    learning_rate: float = bounded(5e-5, above=0.0)
    warmup_steps: int = bounded(0, low=0)  # optimiser steps of linear learning-rate warm-up
    weight_decay: float = bounded(0.0, low=0.0)
    beta1: float = bounded(0.9, low=0.0, high=0.9999)
    beta2: float = bounded(0.95, low=0.0, high=0.99999)
    adam_eps: float = bounded(1e-5, above=0.0)
    grad_clip: float = bounded(1.0, above=0.0)
    microbatch_tokens: int = bounded(8192, low=1)  # C of Algorithm 1
    collective_timeout_s: float = bounded(120.0, above=0.0)  # longest wait of a rank for another one
    checkpoint_every: int = bounded(10, low=1)  # steps
    keep_checkpoints: int = bounded(2, low=1)  # number of newest checkpoints to keep, for resuming
    lora: LoraConfig = field(default_factory=LoraConfig)

    def check(self) -> None:
        check_name("training.engine", self.engine, TRAINING_ENGINES)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Scores of versions during training, and how an evaluation samples."""

    enabled: bool = True  # false: no version is scored, and a run has no accuracies
    every: int = bounded(5, low=1)  # steps between evaluations; base and last version always count
    # The evaluator's own servers; 0: borrow one of the run's for each version, at the end if they sleep.
    servers: int = bounded(1, low=0)
    engine: str = "embedded"  # of its own servers: embedded, vllm, or an import path
    accelerator: str = choice("cpu", "cpu", "cuda")  # of its own servers: a core shared with others, or their own GPUs
    slots: int = bounded(32, low=1)  # of each of its own servers
    samples: int | None = bounded(None, low=1)  # samples per problem, plus a greedy completion; the paper has 32
    temperature: float = bounded(1.0, low=0.01, high=100.0)  # of these samples
    keep_pages: int | None = bounded(10, low=1)  # newest pages to keep, plus the first and the best; None: all

    def check(self) -> None:
        compute = [name for name, traits in GENERATION_ENGINES.items() if not traits.emulates]
        check_name("evaluation.engine", self.engine, compute)


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """The store of checkpoints and final models."""

    url: str = ".areal/storage"  # a folder, file://... or s3://bucket/prefix
    endpoint_url: str | None = None  # for S3 servers other than Amazon's
    patience_s: float = bounded(1800.0, low=0.0)  # how long transient failures are retried
    lease_s: float = bounded(30.0, low=1.0)  # a silent launcher on another machine counts as dead after this

    def check(self) -> None:
        for name, address in (("url", self.url), ("endpoint_url", self.endpoint_url)):
            refuse_credentials(f"storage.{name}", address, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    enabled: bool = True
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else SQLite in the state folder
    experiment: str = "areal"
    table_every: int = bounded(5, low=1)  # steps between tables of trajectories and staleness plots
    flush_timeout_s: float = bounded(60.0, above=0.0)
    batch_metrics: str | None = None  # import path of a custom function: package.module:function

    def check(self) -> None:
        refuse_credentials("tracking.uri", self.uri, MLFLOW_CREDENTIALS)
        check_length("tracking.experiment", self.experiment, _EXPERIMENT_BYTES)


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Conditions that end a run before its last step."""

    score: float | None = bounded(None, low=0.0, high=1.0)  # stop at this held-out accuracy
    minutes: float | None = bounded(None, above=0.0)  # of RL wall time


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Alert thresholds; None disables an alert."""

    max_train_inference_kl: float | None = bounded(0.1, above=0.0)  # nats per token, of policy/train_inference_kl
    max_stale_share: float | None = bounded(0.5, low=0.0, high=1.0)  # of a batch's groups above rollout.max_staleness
    # Share of groups in ten steps, or of rollouts in a batch, without reward.
    max_unscored_share: float | None = bounded(0.1, low=0.0, high=1.0)
    max_step_s: float | None = bounded(1800.0, above=0.0)  # longest RL wall time without a new version
    max_idle_steps: int | None = bounded(5, low=1)  # consecutive steps without training signal; at most all


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Devices, processes and their time limits, remote workers, disk limits."""

    accelerator: str = choice("cpu", "cpu", "cuda")  # a device is a core, or a GPU
    devices: int = bounded(2, low=1)  # cores or GPUs for generation and training
    devices_per_host: int | None = bounded(None, low=1)  # GPUs per machine; None: all are on this machine
    device_memory_gib: float | None = bounded(None, above=0.0)  # of one GPU; None: ask nvidia-smi
    evaluator_nice: int = bounded(15, low=0, high=19)  # nice value; ranks have 0, servers on shared cores 10
    restarts: int = bounded(2, low=0)  # per process; ranks on several machines share one budget
    restart_refill_s: float = bounded(600.0, above=0.0)  # a used restart is refilled after this
    start_timeout_s: float = bounded(120.0, above=0.0)
    liveness_timeout_s: float = bounded(60.0, above=0.0)  # kill a process without a heartbeat for so long
    stall_timeout_s: float = bounded(300.0, above=0.0)  # kill a busy process without progress for so long
    stop_timeout_s: float = bounded(15.0, above=0.0)  # time to save a stopped run's step; then from SIGTERM to SIGKILL
    remote_roles: str = choice("none", "none", "generation", "trainer", "both")  # roles that remote workers run
    head_trains: bool = True  # remote trainers: the head node is the first of training.hosts
    disk_low_gib: float = bounded(5.0, low=0.0)  # warn below this free space in the run's folder or a local store
    disk_min_gib: float = bounded(0.5, low=0.0)  # below it the run ends in order and can be resumed; 0: never
    address: str = "127.0.0.1"  # address of this machine: the controller listens there, for other machines too
    files_port: int = bounded(0, low=0, high=65535)  # of the data server; 0: a free port, chosen once per run

    def check(self) -> None:
        try:
            usable = not ipaddress.ip_address(self.address).is_unspecified  # other machines connect to it
        except ValueError:
            usable = False
        require(usable, "launch.address", "an IP address of this machine", self.address)
        low, least = self.disk_low_gib, self.disk_min_gib
        require(least <= low, "launch.disk_min_gib", f"at most launch.disk_low_gib ({low:g})", least)


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Emulated accelerators: time passes but nothing is computed; both engines must be `emulated`.

    Times and lengths are those of the emulated cluster; see docs/emulation.md. A device of `launch.devices` stands for
    `replicas` replicas of the model.
    """

    accelerator: str = choice("h800", "a100", "h100", "h800", "h200", "l40s")
    model: str = choice("qwen-1.5b", "qwen-1.5b", "qwen-7b", "qwen-14b", "qwen-32b")
    tensor_parallel: int = bounded(1, low=1)  # accelerators per replica
    replicas: int = bounded(1, low=1)  # replicas per server or rank
    speed: float = bounded(100.0, above=0.0)  # emulated seconds per real second
    tokens_per_token: int = bounded(128, low=1)  # real tokens per token of a prompt or completion
    length_median: float = bounded(7360.0, above=0.0, high=1e7)  # tokens per completion, log-normal, before the limit
    length_sigma: float = bounded(0.8, low=0.0, high=5.0)
    decode_overhead_s: float = bounded(0.0132, low=0.0)  # per decode step, for any batch: a fitted residual
    all_reduce_s: float = bounded(15e-6, low=0.0)  # latency of an all-reduce in a replica, two per layer
    bandwidth_share: float = bounded(0.8, above=0.0, high=1.0)  # share of the memory bandwidth, in decoding
    memory_share: float = bounded(0.7, above=0.0, high=1.0)  # share of the memory, for model weights and KV cache
    prefill_share: float = bounded(0.5, above=0.0, high=1.0)  # share of the peak FLOP/s, in prefill
    training_share: float = bounded(0.432, above=0.0, high=1.0)  # share of the peak FLOP/s, by AReaL's FLOP count
    transfer_bytes_per_s: float = bounded(50e9, above=0.0)  # model weights into one accelerator
    handover_s: float = bounded(1.0, low=0.0)  # pause of a replica to load model weights, async mode
    switch_s: float = bounded(5.0, low=0.0)  # between generation and training on the same devices, each way
    rewards_s: float = bounded(0.0, low=0.0)  # time of the last rewards of a synchronous step, after generation


@dataclass(frozen=True, kw_only=True)
class NodesConfig:
    """Nodes of one role."""

    count: int = bounded(1, low=0, high=256)
    gpu: str = choice("h100", "none", "t4", "a10g", "l4", "l40s", "a100-40", "a100-80", "h100", "h200")
    gpus: int = bounded(8, low=0, high=8)  # GPUs per node; 0 with gpu=none
    spot: bool = False  # cheaper, but the cloud may reclaim it
    max_price: float | None = bounded(None, above=0.0)  # of a spot node, dollars per hour; None: the on-demand price
    price: float | None = bounded(None, above=0.0)  # of a node, dollars per hour, for the run's cost; None: unknown
    disk_gib: int = bounded(200, low=50, high=16384)


@dataclass(frozen=True, kw_only=True)
class ProvisionConfig:
    """Provisioning of a run's nodes, for the flow `areal`."""

    # This machine; given hosts with workers for the queues `generation` and `trainer`; a cloud with Terraform.
    kind: str = choice("local", "local", "static", "terraform")
    generation: NodesConfig = field(default_factory=NodesConfig)
    trainer: NodesConfig = field(default_factory=NodesConfig)
    work_pool: str = "areal-nodes"  # Prefect work pool of the nodes' workers
    image: str | None = None  # machine image of the nodes
    zone: str | None = None  # None: the first zone given to `make control`
    software: str = "/opt/areal"  # path of the checkout with its environment, on a node
    install: str | None = None  # file with an install script, if the image lacks the checkout
    prefect_api_url: str | None = None  # as nodes reach it; None: the server of `make control`
    environment: str = ""  # of nodes: NAME=value pairs, in shell syntax
    secrets: str = ""  # NAME=parameter of the cloud's store: PREFECT_API_AUTH_STRING=/areal/prefect
    owner: str | None = None  # owner of the nodes; None: user@machine
    hours: float = bounded(24.0, above=0.0)  # a node shuts down by itself after this time
    lease_s: float = bounded(900.0, low=30.0)  # nodes shut down if their flow is silent for so long
    boot_s: float = bounded(900.0, low=10.0)  # replace a node that has not booted after this
    lost_s: float = bounded(120.0, low=10.0)  # replace a node that is silent for so long
    replacements: int = bounded(8, low=0)  # most replacements of nodes per run
    budget: float | None = bounded(None, above=0.0)  # dollars; at this cost the run checkpoints and ends; needs prices

    def check(self) -> None:
        for role, nodes in (("generation", self.generation), ("trainer", self.trainer)):
            wanted = f"{'0' if nodes.gpu == 'none' else 'at least 1'} with gpu={nodes.gpu}"
            require((nodes.gpu == "none") == (nodes.gpus == 0), f"provision.{role}.gpus", wanted, nodes.gpus)
            if nodes.max_price is not None and not nodes.spot:
                raise ConfigError(f"provision.{role}.max_price: must be null without spot=true; set price instead")
            if self.budget is not None and self.kind == "terraform" and nodes.count and self.dollars(nodes) is None:
                raise ConfigError(f"provision.{role}.price: must be set with provision.budget, in dollars per hour")
        if self.kind != "local" and self.trainer.count < 1:
            raise ConfigError(
                "provision.trainer.count: must be at least 1, as the first trainer node is the run's head node"
            )
        for name, pairs in (("environment", self.environment), ("secrets", self.secrets)):
            shell_pairs(f"provision.{name}", pairs)

    @staticmethod
    def dollars(nodes: NodesConfig) -> float | None:
        """The highest cost of a node, in dollars per hour; None if unknown."""
        return nodes.max_price if nodes.price is None else nodes.price


def shell_pairs(name: str, text: str) -> dict[str, str]:
    """Parse NAME=value pairs in shell syntax. Raises ConfigError that begins with `name`."""
    try:
        pairs = dict(word.split("=", 1) for word in shlex.split(text))
    except ValueError:
        raise ConfigError(f"{name}: must be NAME=value pairs in shell syntax, got {text!r}") from None
    if wrong := [word for word in pairs if not word.isidentifier()]:
        raise ConfigError(f"{name}: names must be letters, digits and underscores, got {wrong[0]!r}")
    return pairs
