"""Estimate GPU memory by arithmetic, so that a run that can't fit is rejected before it starts.

The estimate is the peak of each kind of process on one GPU, in bytes. Each formula counts tensors and names its source.
Symbols: P parameters, N ranks, T tokens of a micro-batch (all of `training.microbatch_tokens`). h is the hidden size
and i the width of the MLP. q and k are the widths of all query and all key-value heads. V is the vocabulary size, and b
the bytes of a number of `training.dtype`. `MARGIN`, a share of the device's memory, covers the rest: the CUDA context,
library workspaces, collective buffers, graphs and fragmentation. So a rejected run can't be expected to work. An
accepted run may still run out of memory.

Servers take GPUs from the first one on, `tensor_parallel x data_parallel` each. In asynchronous mode ranks take the
GPUs after them, in synchronous mode the same ones. Machines have `launch.devices_per_host` GPUs each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from areal_core.config.engines import TRAINING_ENGINES, names
from areal_core.config.fields import require
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.models.adapters import trained_shapes
from areal_core.models.spec import ModelSpec

GIB = 2**30
MARGIN = 0.08  # share of a device's memory that the formulas do not count
SLEEPING = 2 * GIB  # GPU memory of a sleeping vLLM: context, graphs, workspaces; an assumption
ADAPTERS_HELD = 2  # adapters in a vLLM server: the newest, and the previous one for running requests
LOGITS_AT_ONCE = 1 << 27  # most elements of logits that exist at once in a training pass
_FLOAT = 4  # bytes of float32
_BUCKET = 500_000_000  # numbers that DeepSpeed reduces at once; its default
_LIVE = 1_000_000_000  # gathered numbers that ZeRO 3 may keep; DeepSpeed's default
_SUB_GROUP = 1_000_000_000  # parameters that ZeRO 3 updates at once; DeepSpeed's default
_BATCHED_TOKENS = 8192  # tokens in one step of vLLM on a large GPU; its default

Parts = dict[str, float]  # name of a part -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Peak memory of one kind of process on one GPU."""

    who: str
    limit: float  # bytes that it may use
    parts: Parts
    field: str  # the field with the largest effect; `advice` says how to change it
    advice: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def excess(self) -> float:
        return max(0.0, self.total - self.limit)

    @property
    def shares(self) -> str:
        """GiB of each part, as text."""
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """GPU memory of a run, by kind of process."""

    config: RunConfig
    needs: tuple[Need, ...]
    completions: int  # full-length completions (with prompt) in the KV cache of one server

    def table(self) -> str:
        """The plan as text: a summary, then one line for each kind of process."""
        its, launch = self.config, self.config.launch
        machines = -(-launch.devices // (launch.devices_per_host or launch.devices))
        link = "then" if its.mode == "sync" else "and"
        lines = [
            f"{machines} machine{'s' * (machines > 1)}: {its.generation_servers} x {its.devices_per_server} GPUs "
            f"generate, {link} {its.training_ranks} train; the KV cache of a server holds {self.completions} "
            f"completions of {its.context} tokens"
        ]
        for need in self.needs:
            verdict = f"{need.excess / GIB:.1f} GiB too many" if need.excess else "fits"
            lines.append(f"{need.who}: {need.total / GIB:.1f} of {need.limit / GIB:.1f} GiB, {verdict}: {need.shares}")
        return "\n".join(lines)


def check_footprint(config: RunConfig, spec: ModelSpec, memory_bytes_per_device: float) -> Footprint:
    """The plan of a run. Raises ConfigError, in one line, if the run can't be placed or does not fit.
    The error names the field to change, the needed and available memory, the excess, and the parts of the need."""
    plan = footprint(config, spec, memory_bytes_per_device)
    for need in plan.needs:
        if need.excess:
            raise ConfigError(
                f"{need.field}: a {need.who} needs {need.total / GIB:.1f} GiB of GPU memory, {need.excess / GIB:.1f} "
                f"GiB more than its {need.limit / GIB:.1f} GiB: {need.shares}; {need.advice}"
            )
    return plan


def footprint(config: RunConfig, spec: ModelSpec, memory_bytes_per_device: float) -> Footprint:
    """Memory need of each kind of process on a device. Raises ConfigError if the run can't be placed."""
    check_placement(config, spec)
    memory = memory_bytes_per_device
    needs = (*_ranks(config, spec, memory), _server(config, spec, memory))
    return Footprint(config=config, needs=needs, completions=full_completions(config, spec, memory))


def _training_remedy(config: RunConfig, state: Parts, run: Parts) -> tuple[str, str]:
    """The field with the largest effect on a rank's memory, and advice on how to change it."""
    if "activations" in run and sum(run.values()) > sum(state.values()):
        if not config.training.checkpoint_activations:
            return "training.checkpoint_activations", "set it, or lower microbatch_tokens"
        return "training.microbatch_tokens", "lower it, and task.max_new_tokens if trajectories are that long"
    if not config.training_traits.shards:
        return (
            "training.engine",
            f"set it to {names(TRAINING_ENGINES, 'shards')}, which shards training state across ranks",
        )
    return "training.zero_stage", "raise zero_stage (to 3) or ranks, or lower microbatch_tokens"


def full_completions(config: RunConfig, spec: ModelSpec, memory: float) -> int:
    """Number of full-length completions, prompt included, in the KV cache of one server.
    vLLM's cache takes the rest of `generation.vllm.memory_share`. The embedded engine has one completion per slot."""
    if not config.generation_traits.own_server:
        return config.generation.slots
    vllm = config.generation.vllm
    left = vllm.memory_share * memory - sum(_with_margin(server_state(config, spec), memory).values())
    return max(0, int(left // completion_bytes(config, spec))) * vllm.data_parallel


def _server(config: RunConfig, spec: ModelSpec, memory: float) -> Need:
    """Memory need of a server, which must hold at least one full-length completion."""
    vllm = config.generation_traits.own_server
    completions = 1 if vllm else config.generation.slots
    parts = server_state(config, spec) | {"cache": completions * completion_bytes(config, spec)}
    return Need(
        who="server",
        limit=memory * (config.generation.vllm.memory_share if vllm else 1.0),
        parts=_with_margin(parts, memory),
        field="generation.vllm.tensor_parallel" if vllm else "generation.slots",
        advice="raise it, or generation.vllm.memory_share" if vllm else "lower it, or set generation.engine=vllm",
    )


def _ranks(config: RunConfig, spec: ModelSpec, memory: float) -> Iterator[Need]:
    """Memory needs of a rank; in synchronous mode, with a server on the same GPU.
    A sleeping vLLM server has freed its model weights and KV cache, but the rank keeps its state while the server
    generates. Without sleep, both keep all of their memory. The embedded engine never frees memory."""
    state, run = training_state(config, spec, reference=config.algorithm.kl_coef > 0), training_pass(config, spec)
    remedy = _training_remedy(config, state, run)

    def need(who: str, parts: Parts, field: str, advice: str) -> Need:
        return Need(who=who, limit=memory, parts=_with_margin(parts, memory), field=field, advice=advice)

    if config.mode == "async":
        yield need("rank", state | run, *remedy)
        return
    if config.generation_traits.own_server:
        served = config.generation.vllm.memory_share * memory
    else:
        served = sum(_server(config, spec, memory).parts.values()) - MARGIN * memory
    if not config.sleeps or not config.generation_traits.sleeps:
        advice = "set generation.sleep=true and generation.engine=vllm"
        yield need("rank beside a server", state | run | {"server": served}, "generation.sleep", advice)
        return
    yield need("rank beside a sleeping server", state | run | {"sleeping server": SLEEPING}, *remedy)
    yield need("server beside a rank", state | {"server": served}, "generation.vllm.memory_share", "lower it")


def _with_margin(parts: Parts, memory: float) -> Parts:
    return parts | {"margin": MARGIN * memory}


def check_placement(config: RunConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for a run whose machines, servers or heads can't be placed.
    Machines must be filled. A server must fit on one machine, and no server may straddle two. A tensor-parallel group
    must be able to partition the heads. A server has no more GPUs than the run."""
    devices, per_server = config.launch.devices, config.devices_per_server
    per_host = config.launch.devices_per_host or devices
    machine = f"launch.devices_per_host ({per_host})"
    if devices > per_host:
        require(devices % per_host == 0, "launch.devices", f"a multiple of {machine}", devices)
        wanted = f"a divisor of {machine}, so that no server spans two machines"
        require(per_host % per_server == 0, "generation.vllm.tensor_parallel * data_parallel", wanted, per_server)
        wanted = f"a multiple of {machine}, so that ranks fill whole machines"
        require(config.training_ranks % per_host == 0, "training.ranks", wanted, config.training_ranks)
    # vLLM partitions query heads evenly; key-value heads evenly, or each to the same number of GPUs.
    degree = _degree(config)
    fits = not spec.heads % degree and not (spec.kv_heads % degree and degree % spec.kv_heads)
    wanted = (
        f"a divisor of the model's {spec.heads} heads, and a divisor or multiple of {spec.kv_heads} key-value heads"
    )
    require(fits, "generation.vllm.tensor_parallel", wanted, degree)


# -- training ----------------------------------------------------------------------------------------------------------


def training_state(config: RunConfig, spec: ModelSpec, *, reference: bool = False) -> Parts:
    """Bytes that a rank keeps between steps: weights, gradients, optimiser state and reference model.

    In bfloat16 these are 2 P for the model weights, 4 P for float32 gradients, and 12 P for the optimiser: float32
    weights and Adam's two moments. ZeRO stage 1 partitions the optimiser state over N ranks, stage 2 also the
    gradients, stage 3 also the weights. Sources: Rajbhandari et al., 2020, arXiv 1910.02054, section 3.1 and Fig. 1;
    for float32 gradients, Table 3 of the AReaL paper.

    At stage 1 and in the torch engine, a micro-batch's gradient takes 2 P beside the sum that it is added to. In
    float32 there is no such copy. If nothing is partitioned either, the optimiser needs no weights of its own.
    DeepSpeed's stage 0 has only float32 weights, which layers round as they run: 2 P for the rounded copy. A reference
    model is one more copy on every rank.

    With an adapter of A parameters (`training.lora`), P is A, except that the weights of passes are P + A. The frozen
    weights also serve as the reference model, unless they are partitioned.
    """
    ranks, count = config.training_ranks, trained_parameters(config, spec)
    frozen = 0 if config.training.lora.rank is None else spec.parameters
    stage, number = config.zero_stage, _number(config)
    rounds = number < _FLOAT and config.training_traits.shards and stage == 0
    mixed = number < _FLOAT and not rounds
    gradients = _FLOAT + (number if mixed and stage < 2 else 0)
    optimiser = _FLOAT * (3 if mixed or stage else 2)
    return {
        "weights": ((number + (_FLOAT if rounds else 0)) * count + number * frozen) / (ranks if stage == 3 else 1),
        "gradients": gradients * count / (ranks if stage >= 2 else 1),
        "optimiser": optimiser * count / (ranks if stage else 1),
        "reference": float(number * spec.parameters) if reference and (not frozen or stage == 3) else 0.0,
    }


def trained_parameters(config: RunConfig, spec: ModelSpec) -> int:
    """Number of trained parameters: those of the adapter, or all. Raises ConfigError for a wrong adapter."""
    return sum(math.prod(shape) for shape in trained_shapes(spec, config.training.lora.adapter).values())


def training_pass(config: RunConfig, spec: ModelSpec) -> Parts:
    """The memory of a rank beside its state, in bytes: of a micro-batch's pass, or of a larger update.

    A pass keeps the activations of all layers. With `checkpoint_activations` it keeps every layer's input, and one
    layer's activations while they are recomputed. It also needs the buffers of one layer's backward pass, or before
    that those of the output. An update keeps the float32 weights that this rank changes: 4 P over the ranks that share
    them. DeepSpeed keeps the change as well; ZeRO 3 updates a part of the weights at a time.
    """
    training, number, tokens = config.training, _number(config), config.training.microbatch_tokens
    frozen = training.lora.rank is not None
    layer = layer_activations(spec, tokens, number)
    backward = backward_buffers(spec, tokens, number, frozen=frozen)
    head = head_buffers(spec, tokens, number, frozen=frozen)
    if training.checkpoint_activations:
        activations = spec.layers * tokens * spec.hidden_size * number + max(layer + backward, head)
    else:
        activations = spec.layers * layer + max(backward, head)
    changed = trained_parameters(config, spec) / (config.training_ranks if config.zero_stage else 1)
    at_once = min(changed, _SUB_GROUP) if config.zero_stage == 3 else changed
    update = _FLOAT * at_once * (2 if config.training_traits.shards else 1)
    peak = {"update": update} if update > activations else {"activations": activations}
    return peak | {"collectives": _collectives(config, spec)}


def layer_activations(spec: ModelSpec, tokens: int, number: int) -> float:
    """Bytes that one layer keeps for its backward pass (`training.model.forward.decoder_layer`).

    Two norms keep their input and the normalised input, both in float32, and their result. Attention keeps rotated
    queries and keys, the values, and its result in two layouts. The MLP keeps the gate, its silu, the other factor and
    the product. In sum T (2 h (8 + b) + b (3 q + 2 k + 4 i)). Norms of heads keep 8 (q + k) more per token; their
    result is rotated at once.

    A fused norm keeps less, and so do the CPU kernels (`training.model.kernels`).
    """
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norms = 2 * spec.hidden_size * (2 * _FLOAT + number)
    if spec.qk_norm:
        norms += (query + key) * 2 * _FLOAT
    return tokens * (norms + number * (3 * query + 2 * key + 4 * spec.intermediate_size))


def backward_buffers(spec: ModelSpec, tokens: int, number: int, *, frozen: bool = False) -> float:
    """Bytes of gradients that exist at once in a layer's backward pass, beyond activations already freed.
    For each token these are two tensors of the MLP's width and two of the hidden size. Unless the weights are frozen,
    also the gradients of the weights before they are accumulated."""
    weights = 0 if frozen else number * layer_parameters(spec)
    return tokens * number * (2 * spec.intermediate_size + 2 * spec.hidden_size) + weights


def head_buffers(spec: ModelSpec, tokens: int, number: int, *, frozen: bool = False) -> float:
    """Bytes for the output layer: hidden states, their gradient, logits, and the gradient of its matrix.

    Hidden states are those of the completion tokens (at most all T). The matrix has a gradient in float32 and in b,
    unless it is frozen. Three slices of the logits are in float32 (`training.model.forward`). A module of transformers
    makes the logits of all tokens, and their gradient.
    """
    vocabulary = 0 if frozen else spec.vocab_size * spec.hidden_size
    if spec.transformers is not None:
        return 2.0 * tokens * spec.vocab_size * number + _FLOAT * vocabulary
    hidden = 2 * tokens * spec.hidden_size * number
    matrix = vocabulary * (_FLOAT + (number if number < _FLOAT else 0))
    return hidden + matrix + 3 * _FLOAT * min(tokens * spec.vocab_size, LOGITS_AT_ONCE)


def layer_parameters(spec: ModelSpec) -> int:
    outer = (2 - spec.tie_embeddings) * spec.vocab_size * spec.hidden_size + spec.hidden_size
    return (spec.parameters - outer) // spec.layers


def _collectives(config: RunConfig, spec: ModelSpec) -> float:
    """Bytes for DeepSpeed's collectives.
    Two buckets of numbers are reduced over the ranks, and one of them is in float32. ZeRO 3 also holds gathered
    weights: of two parts (layers, a vocabulary matrix), or as many as it may keep."""
    if not config.training_traits.shards:
        return 0.0
    number = _number(config)
    buckets = (2.0 * number + _FLOAT) * min(_BUCKET, trained_parameters(config, spec))
    layer, vocabulary = layer_parameters(spec), spec.vocab_size * spec.hidden_size
    gathered = min(spec.parameters, max(_LIVE, layer + max(layer, vocabulary)))
    return buckets + (number * gathered if config.zero_stage == 3 else 0)


def _number(config: RunConfig) -> int:
    """Bytes of a number in a training pass."""
    return 2 if config.training.dtype == "bfloat16" else _FLOAT


# -- generation --------------------------------------------------------------------------------------------------------


def server_state(config: RunConfig, spec: ModelSpec) -> Parts:
    """Bytes of a server on one GPU beside its KV cache.

    vLLM holds its partition of the model weights, and its adapters. It also holds the widest tensors of one step: the
    MLP's gate, other factor and product, and four hidden states. Every slot has float32 logits, their log-probabilities
    and a copy. The embedded engine has two sets of weights, as it stages one while the other runs, and the same logits
    with two in float64.
    """
    number, degree, slots = _served_number(config), _degree(config), config.generation.slots
    weights = number * spec.parameters / degree
    if not config.generation_traits.own_server:
        return {"weights": 2 * weights, "step": 24.0 * slots * spec.vocab_size}
    width = 3 * spec.intermediate_size / degree + 4 * spec.hidden_size
    step = _BATCHED_TOKENS * width * number + 3.0 * _FLOAT * slots * spec.vocab_size
    if config.training.lora.rank is None:
        return {"weights": weights, "step": step}
    adapters = float(ADAPTERS_HELD * number * trained_parameters(config, spec))
    return {"weights": weights, "adapters": adapters, "step": step}


def completion_bytes(config: RunConfig, spec: ModelSpec) -> float:
    """Bytes of keys and values of a full-length completion, prompt included, on one GPU of a server.
    Per token: 2 x layers x key-value heads on that GPU x head width x bytes of a number."""
    heads = max(1, spec.kv_heads // _degree(config))
    token = 2 * spec.layers * heads * spec.head_dim * _served_number(config)
    return config.context * token


def _degree(config: RunConfig) -> int:
    return config.generation.vllm.tensor_parallel if config.generation_traits.own_server else 1


def _served_number(config: RunConfig) -> int:
    """Bytes of a weight, and of a number in the cache; a model's own dtype counts as half precision."""
    return 2 if config.generation_traits.own_server and config.generation.vllm.dtype != "float32" else _FLOAT
