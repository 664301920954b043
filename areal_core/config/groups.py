"""The groups of a configuration: every field, its default and its bounds, which `areal_core.config.fields` checks, and
what must hold between fields of a group (`check`). The algorithm's group is in `areal_core.config.algorithm`.
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

TASKS = {  # and the verifier that their gold answers are written for
    "arithmetic": "exact_match",
    "rows": "mathematics",
    "reasoning_gym": "reasoning_gym",
}
MLFLOW_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, are for them"
_EXPERIMENT_BYTES = 250  # MLflow's databases take 256 characters


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The base policy: a folder in the transformers format, a model of the Hub, a GGUF file, or the embedded model of
    the warm-up."""

    # A folder, hub:owner/name@revision, or a file that ends on .gguf; None: make the embedded model of the shape below.
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
    """Prompts as messages of a chat, in the format of the model's own chat template."""

    enabled: bool = False  # false: prompts are fed as they stand
    system: str | None = None  # system prompt; None: the template's own, if it has one
    thinking: bool | None = None  # the template's switch `enable_thinking`; None: as the template has it


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Prompts, and the limits of prompts and completions."""

    name: str = "arithmetic"  # one of TASKS, or an import path: package.module:name
    max_operations: int = bounded(16, low=1, high=64)  # arithmetic: longest chain
    length_decay: float = bounded(0.85, above=0.0, high=1.0)  # arithmetic: P(n+1 operations) / P(n)
    dataset: str | None = None  # reasoning_gym: one of its data sets
    dataset_options: str = ""  # reasoning_gym: name=value pairs of that data set, as a shell would read them
    # rows, see docs/data.md: .jsonl, .json or .parquet
    path: str | None = None  # training prompts; None: there is nothing to train on, only to evaluate
    held_out_path: str | None = None
    prompt_field: str = "question"  # with dots where it lies in others: extra.question
    answer_field: str = "answer"  # the gold answer, as environment.verifier wants it
    prompt_template: str | None = None  # Jinja over the row's fields; None: what prompt_field holds, as it stands
    held_out_prompt_field: str | None = None  # None: as in the training file, like the next two
    held_out_answer_field: str | None = None
    held_out_prompt_template: str | None = None
    chat: ChatConfig = field(default_factory=ChatConfig)
    held_out: int = bounded(1024, low=1)  # prompts
    max_prompt_tokens: int = bounded(40, low=1)
    max_new_tokens: int = bounded(112, low=1)  # of a trajectory after its prompt, over all of its turns

    @property
    def trains(self) -> bool:
        """Whether it has prompts to train on."""
        return self.name != "rows" or self.path is not None

    def check(self) -> None:
        check_name("task.name", self.name, TASKS)
        if self.name == "reasoning_gym" and not self.dataset:
            raise ConfigError("task.dataset: task.name=reasoning_gym needs the name of one of its data sets")
        if self.name == "rows" and not self.held_out_path:
            raise ConfigError("task.held_out_path: task.name=rows needs a file of prompts to evaluate with")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A language model as verifier, where environment.verifier is judge. Limits are those of each reward worker."""

    url: str | None = None  # of a server with OpenAI's routes: https://api.openai.com/v1
    model: str = ""
    key_variable: str = "AREAL_JUDGE_KEY"  # environment variable that holds the key, if the server wants one
    prompt: str = (  # Jinja over task, row, answer (the gold answer) and completion
        "Question:\n{{ task.text }}\n\nReference answer:\n{{ answer }}\n\nAnswer to be judged:\n{{ completion }}\n\n"
        "Reply with a number from 0 (wrong) to 1 (right), and nothing else."
    )
    max_tokens: int = bounded(16, low=1)  # of its reply, which has to end on the score
    at_once: int = bounded(16, low=1)  # requests
    requests_per_s: float | None = bounded(None, above=0.0)  # None: no limit
    tries: int = bounded(4, low=1)
    timeout_s: float = bounded(60.0, above=0.0)  # of a request
    dollars_per_million_read: float = bounded(0.0, low=0.0)  # tokens, for the curve of the cost
    dollars_per_million_written: float = bounded(0.0, low=0.0)

    def check(self) -> None:
        refuse_credentials("environment.judge.url", self.url, self.key_variable)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What happens between a prompt and its rewards. Names are registered ones or import paths, package.module:name."""

    name: str = "single_turn"  # single_turn, two_turn, calculator, or an import path
    verifier: str | None = None  # a registered one, or an import path; None: the default of task.name
    rewards: str = ""  # more reward functions with their coefficients: package.module:name=0.5, with commas between
    max_no_result: float = bounded(0.2, low=0.0, high=1.0)  # of the rollouts of 32 groups: the run ends above it
    verify_truncated: bool = False  # completions that ran into the length limit; else they are wrong unseen
    retry_message: str = "="  # two_turn: message to the policy after a first try that is wrong
    retry_score: float = bounded(0.5, low=0.0, high=1.0)  # two_turn: of a second try that is right
    sandbox: str = choice("bubblewrap", "bubblewrap", "none")  # of programs and verdicts; none waives it
    program_cpu_s: float = bounded(10.0, low=0.5, high=3600.0)  # code: of one program, over all of its tests
    program_memory_mib: int = bounded(1024, low=64, high=2**20)  # code: of a program; its processes may share it
    program_processes: int = bounded(8, low=1, high=4096)  # code: of a program at a time, threads included
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def judged_by(self) -> str:
        """How errors name the verifier."""
        return f"environment.verifier {self.verifier}" if self.verifier else "the task's verifier"

    @property
    def program_wall_s(self) -> float:
        """Seconds that a program may run: one on a busy core has its CPU time all the same."""
        return 4 * self.program_cpu_s


@dataclass(frozen=True, kw_only=True)
class MixedTask:
    """One of the tasks that a run trains on in given ratios."""

    ratio: int = bounded(1, low=1, high=1000)  # prompts of it in a block of as many as all ratios add up to
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
    """vLLM's own server, where generation.engine is vllm."""

    python: str | None = None  # interpreter of the environment that vLLM is installed in; None: this one
    dtype: str = choice("auto", "auto", "float32", "bfloat16", "float16")  # auto: float32 on a CPU, else the model's
    tensor_parallel: int = bounded(1, low=1)  # GPUs that share one replica
    data_parallel: int = bounded(1, low=1)  # replicas behind one server
    memory_share: float = bounded(0.85, above=0.0, high=1.0)  # of a GPU's memory
    kv_cache_gib: int = bounded(1, low=1)  # on a CPU
    arguments: str = ""  # more of its command line, as a shell would read it


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The engine behind the generation servers."""

    engine: str = "embedded"  # one of GENERATION_ENGINES, or an import path: package.module:function
    servers: int | None = bounded(None, low=1)  # None: one for each device, but for GPUs that train in async mode
    slots: int = bounded(32, low=1)  # completions that one server decodes at once: as many as a core's caches hold
    interruption: str = choice("recompute", "recompute", "resubmit", "keep", "wait")  # of completions, by an update
    temperature: float = bounded(1.0, low=0.01, high=100.0)  # of sampling; the trainer's policy has it too
    sleep: bool = False  # synchronous mode: servers release their accelerators while the trainer trains on them
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def check(self) -> None:
        check_name("generation.engine", self.engine, GENERATION_ENGINES)
        if self.temperature > (most := known_generation(self.engine).max_temperature):
            raise ConfigError(f"generation.temperature: {self.engine} takes {most:g} at most, got {self.temperature:g}")
        try:
            shlex.split(self.vllm.arguments)
        except ValueError as error:
            raise ConfigError(f"generation.vllm.arguments: {error}, in {self.vllm.arguments!r}") from None


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Admission, the staleness bound (Eq. 3) and what happens to failures and stragglers."""

    batch_size: int = bounded(512, low=1)  # B, trajectories a step
    max_staleness: int | None = bounded(None, low=0)  # eta; None: 0 in sync mode, else 2
    pipeline_depth: float | None = bounded(None, low=0.0)  # batches begun beside the one that trains; None: eta
    batch_selection: str = choice("wait", "wait", "admit", "drop")  # which groups a batch takes, and so what eta bounds
    dynamic_sampling: bool = False  # a group whose rewards are all equal gives its place to another prompt
    max_zero_variance_groups: int = bounded(1024, low=1)  # of these, one after the other, before the run fails
    max_tries: int = bounded(3, low=1)  # requests and scorings of one group before it is dropped
    max_requeues: int = bounded(2, low=0)  # times that a prompt dropped as stale is queued again
    request_timeout_s: float = bounded(120.0, above=0.0)
    reward_timeout_s: float = bounded(20.0, above=0.0)
    deadline_s: float | None = bounded(None, above=0.0)  # of a rollout, since its group began; None: none
    reward_workers: int = bounded(1, low=1)
    retain: str = choice("uncommitted", "uncommitted", "all")  # payloads kept after a committed checkpoint


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """An adapter that is trained and published in place of the weights, which stay those of the base model."""

    rank: int | None = bounded(None, low=1, high=512)  # None: no adapter, all weights are trained
    alpha: float = bounded(32.0, above=0.0)  # what an adapter adds is multiplied by alpha / rank
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # linear layers, with commas between

    @property
    def names(self) -> tuple[str, ...]:
        """Of `targets`."""
        return tuple(name.strip() for name in self.targets.split(","))

    @property
    def adapter(self) -> Lora | None:
        """The form of the adapter; None without one."""
        return None if self.rank is None else Lora(rank=self.rank, alpha=self.alpha, targets=self.names)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The optimiser, how a batch is cut and how often the state is saved."""

    engine: str = "torch"  # one of TRAINING_ENGINES, or an import path: package.module:function
    steps: int = bounded(25, low=1)
    zero_stage: int = bounded(2, low=0, high=3)  # deepspeed: what ranks partition; 1 moments, 2 gradients, 3 weights
    dtype: str = choice("float32", "float32", "bfloat16")  # of passes over the model; optimiser state is float32
    checkpoint_activations: bool = False  # keep only a layer's input; compute the rest again in the backward pass
    ranks: int | None = bounded(None, low=1)  # data-parallel processes; None: see RunConfig.training_ranks
    hosts: int = bounded(1, low=1)  # machines that the ranks are spread over, the head node first
    # PPO minibatches a step, cut by whole groups; the completions of each are partitioned over the ranks.
    minibatches: int = bounded(4, low=1)
    learning_rate: float = bounded(5e-5, above=0.0)
    warmup_steps: int = bounded(0, low=0)  # optimiser steps of linear learning-rate warm-up
    weight_decay: float = bounded(0.0, low=0.0)
    beta1: float = bounded(0.9, low=0.0, high=0.9999)
    beta2: float = bounded(0.95, low=0.0, high=0.99999)
    adam_eps: float = bounded(1e-5, above=0.0)
    grad_clip: float = bounded(1.0, above=0.0)
    microbatch_tokens: int = bounded(8192, low=1)  # C of Algorithm 1
    collective_timeout_s: float = bounded(120.0, above=0.0)  # that a rank waits for another
    checkpoint_every: int = bounded(10, low=1)  # steps
    keep_checkpoints: int = bounded(2, low=1)  # the newest ones, which a run can be resumed from
    lora: LoraConfig = field(default_factory=LoraConfig)

    def check(self) -> None:
        check_name("training.engine", self.engine, TRAINING_ENGINES)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The scores of versions beside the training, and how an evaluation samples."""

    enabled: bool = True  # false: no version is scored, and a run has no accuracies
    every: int = bounded(5, low=1)  # steps between two evaluations; the base and the last version always count
    # Generation servers of its own; 0: one of the run's is borrowed for each version, at the end where they sleep.
    servers: int = bounded(1, low=0)
    engine: str = "embedded"  # of its own servers: embedded, vllm, or an import path
    accelerator: str = choice("cpu", "cpu", "cuda")  # of its own servers: a core beside all else, or GPUs of their own
    slots: int = bounded(32, low=1)  # of each of its own servers
    samples: int | None = bounded(None, low=1)  # of a problem, beside its greedy completion; the paper has 32
    temperature: float = bounded(1.0, low=0.01, high=100.0)  # of these samples
    keep_pages: int | None = bounded(10, low=1)  # of the newest versions, besides the first and the best; None: all

    def check(self) -> None:
        compute = [name for name, traits in GENERATION_ENGINES.items() if not traits.emulates]
        check_name("evaluation.engine", self.engine, compute)


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Where checkpoints and the final model go."""

    url: str = ".areal/storage"  # a folder, file://... or s3://bucket/prefix
    endpoint_url: str | None = None  # S3 servers other than Amazon's
    patience_s: float = bounded(1800.0, low=0.0)  # that one which fails for a while is tried again
    lease_s: float = bounded(30.0, low=1.0)  # after which a launcher that is silent, on another machine, counts as dead

    def check(self) -> None:
        for name, address in (("url", self.url), ("endpoint_url", self.endpoint_url)):
            refuse_credentials(f"storage.{name}", address, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are for them")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    enabled: bool = True
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else SQLite in the state folder
    experiment: str = "areal"
    table_every: int = bounded(5, low=1)  # steps between two tables of sampled trajectories and staleness pictures
    flush_timeout_s: float = bounded(60.0, above=0.0)
    batch_metrics: str | None = None  # import path of a function of one's own: package.module:function

    def check(self) -> None:
        refuse_credentials("tracking.uri", self.uri, MLFLOW_CREDENTIALS)
        check_length("tracking.experiment", self.experiment, _EXPERIMENT_BYTES)


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """What ends a run before its last step."""

    score: float | None = bounded(None, low=0.0, high=1.0)  # held-out accuracy
    minutes: float | None = bounded(None, above=0.0)  # of RL wall time


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """When a run that goes on is told to be unwell; None: never."""

    max_train_inference_kl: float | None = bounded(0.1, above=0.0)  # nats a token, of policy/train_inference_kl
    max_stale_share: float | None = bounded(0.5, low=0.0, high=1.0)  # of a batch's groups, over rollout.max_staleness
    max_unscored_share: float | None = bounded(
        0.1, low=0.0, high=1.0
    )  # without rewards: of the groups of ten steps, or a batch
    max_step_s: float | None = bounded(1800.0, above=0.0)  # of RL wall time, without a new version
    max_idle_steps: int | None = bounded(5, low=1)  # in a row that teach nothing; of a shorter run all


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Devices, processes and their time limits, remote workers, logs."""

    accelerator: str = choice("cpu", "cpu", "cuda")  # what a device is: a core, or a GPU
    devices: int = bounded(2, low=1)  # cores or GPUs that generate and train
    devices_per_host: int | None = bounded(None, low=1)  # GPUs of one machine; None: all of them are on this one
    device_memory_gib: float | None = bounded(None, above=0.0)  # of one GPU; None: nvidia-smi is asked
    evaluator_nice: int = bounded(15, low=0, high=19)  # beside 0 of the ranks and 10 of servers that share their cores
    restarts: int = bounded(2, low=0)  # per process; of ranks on several machines: of their whole group
    restart_refill_s: float = bounded(600.0, above=0.0)  # after which one that was used comes back
    start_timeout_s: float = bounded(120.0, above=0.0)
    liveness_timeout_s: float = bounded(60.0, above=0.0)  # a process without a sign of life for so long is killed
    stall_timeout_s: float = bounded(300.0, above=0.0)  # and one that is busy and does not get on
    stop_timeout_s: float = bounded(15.0, above=0.0)  # of a stopped run, to save its step; then from SIGTERM to SIGKILL
    remote_roles: str = choice(
        "none", "none", "generation", "trainer", "both"
    )  # roles that areal_core.run.remote_worker runs
    head_trains: bool = True  # with remote trainers: whether the head node is the first of training.hosts
    disk_low_gib: float = bounded(5.0, low=0.0)  # free for the run's folder, or a store that is one: below it is told
    disk_min_gib: float = bounded(0.5, low=0.0)  # below it the run ends in order, to be resumed; 0: it does not
    address: str = "127.0.0.1"  # of this machine: where the controller listens, and where other machines find it
    files_port: int = bounded(0, low=0, high=65535)  # of the data server; 0: a free one, chosen once for a run

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
    """Emulated accelerators, whose time passes and which compute nothing, where both engines are `emulated`; see
    docs/emulation.md. Times and lengths are those of the emulated cluster. A device of `launch.devices` stands for
    `replicas` replicas of the model."""

    accelerator: str = choice("h800", "a100", "h100", "h800", "h200", "l40s")
    model: str = choice("qwen-1.5b", "qwen-1.5b", "qwen-7b", "qwen-14b", "qwen-32b")
    tensor_parallel: int = bounded(1, low=1)  # accelerators of one replica
    replicas: int = bounded(1, low=1)  # that one server or rank stands for
    speed: float = bounded(100.0, above=0.0)  # emulated seconds in a real one
    tokens_per_token: int = bounded(128, low=1)  # real tokens that one token of prompts and completions stands for
    length_median: float = bounded(7360.0, above=0.0, high=1e7)  # tokens of a completion, log-normal, before the limit
    length_sigma: float = bounded(0.8, low=0.0, high=5.0)
    decode_overhead_s: float = bounded(0.0132, low=0.0)  # of a decode step, whatever the batch: a fitted residual
    all_reduce_s: float = bounded(15e-6, low=0.0)  # latency of a sum over the accelerators of a replica, two a layer
    bandwidth_share: float = bounded(0.8, above=0.0, high=1.0)  # of the memory bandwidth, in decoding
    memory_share: float = bounded(0.7, above=0.0, high=1.0)  # of the memory, for weights and KV cache
    prefill_share: float = bounded(0.5, above=0.0, high=1.0)  # of the peak arithmetic
    training_share: float = bounded(0.432, above=0.0, high=1.0)  # the same, of operations as AReaL counts them
    transfer_bytes_per_s: float = bounded(50e9, above=0.0)  # of new weights into one accelerator
    handover_s: float = bounded(1.0, low=0.0)  # that a replica stands still for new weights, async mode
    switch_s: float = bounded(5.0, low=0.0)  # between generating and training on the same accelerators, each way
    rewards_s: float = bounded(0.0, low=0.0)  # that the last rewards of a synchronous step take, after generation


@dataclass(frozen=True, kw_only=True)
class NodesConfig:
    """Nodes of one role."""

    count: int = bounded(1, low=0, high=256)
    gpu: str = choice("h100", "none", "t4", "a10g", "l4", "l40s", "a100-40", "a100-80", "h100", "h200")
    gpus: int = bounded(8, low=0, high=8)  # of one node; 0 with gpu=none
    spot: bool = False  # cheaper, and may be reclaimed
    max_price: float | None = bounded(None, above=0.0)  # of a spot node, dollars an hour; None: its price on demand
    price: float | None = bounded(None, above=0.0)  # of a node, dollars an hour, for the cost of the run; None: unknown
    disk_gib: int = bounded(200, low=50, high=16384)


@dataclass(frozen=True, kw_only=True)
class ProvisionConfig:
    """Where the nodes of a run come from, for the flow `areal`."""

    # This machine; given hosts, whose workers serve the queues `generation` and `trainer`; or a cloud, by Terraform.
    kind: str = choice("local", "local", "static", "terraform")
    generation: NodesConfig = field(default_factory=NodesConfig)
    trainer: NodesConfig = field(default_factory=NodesConfig)
    work_pool: str = "areal-nodes"  # Prefect's, that the nodes' workers serve
    image: str | None = None  # that nodes boot
    zone: str | None = None  # None: the first that `make control` was given
    software: str = "/opt/areal"  # the checkout with its environment, on a node
    install: str | None = None  # a file: the script that makes it, where the image has none
    prefect_api_url: str | None = None  # as nodes reach it; None: what `make control` has made
    environment: str = ""  # of nodes: NAME=value pairs, as a shell would read them
    secrets: str = ""  # the same, of names of parameters of the cloud's store: PREFECT_API_AUTH_STRING=/areal/prefect
    owner: str | None = None  # whose the nodes are; None: user@machine
    hours: float = bounded(24.0, above=0.0)  # after which a node ends by itself, whatever happens elsewhere
    lease_s: float = bounded(900.0, low=30.0)  # nodes whose flow is silent for so long are ended
    boot_s: float = bounded(900.0, low=10.0)  # for a node to come up, before it is replaced
    lost_s: float = bounded(120.0, low=10.0)  # of silence, after which a node is replaced
    replacements: int = bounded(8, low=0)  # nodes of a run that are replaced
    budget: float | None = bounded(None, above=0.0)  # dollars that end a run, after a checkpoint; needs prices

    def check(self) -> None:
        for role, nodes in (("generation", self.generation), ("trainer", self.trainer)):
            if (nodes.gpu == "none") != (nodes.gpus == 0):
                raise ConfigError(
                    f"provision.{role}.gpus: must be 0 with gpu=none, and only then, got {nodes.gpus} of {nodes.gpu}"
                )
            if nodes.max_price is not None and not nodes.spot:
                raise ConfigError(f"provision.{role}.max_price: is for spot nodes (spot=true): others have a price")
            if self.budget is not None and self.kind == "terraform" and nodes.count and self.dollars(nodes) is None:
                raise ConfigError(f"provision.{role}.price: must be given where there is a budget, dollars an hour")
        if self.kind != "local" and self.trainer.count < 1:
            raise ConfigError("provision.trainer.count: must be at least 1: the first one is the run's head node")
        for name, pairs in (("environment", self.environment), ("secrets", self.secrets)):
            shell_pairs(f"provision.{name}", pairs)

    @staticmethod
    def dollars(nodes: NodesConfig) -> float | None:
        """What a node costs an hour, at most."""
        return nodes.max_price if nodes.price is None else nodes.price


def shell_pairs(name: str, text: str) -> dict[str, str]:
    """NAME=value pairs, as a shell would read them. Raises ConfigError that begins with `name`."""
    try:
        pairs = dict(word.split("=", 1) for word in shlex.split(text))
    except ValueError:
        raise ConfigError(f"{name}: must be pairs NAME=value, as a shell would read them, got {text!r}") from None
    if wrong := [word for word in pairs if not word.isidentifier()]:
        raise ConfigError(f"{name}: {wrong[0]!r} is not the name of an environment variable")
    return pairs
