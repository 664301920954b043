"""How much memory a run needs of every GPU, by arithmetic: what can't fit is refused before anything starts.

For each kind of process its peak on one GPU. Formulas, each with its source, count tensors: P parameters, N ranks, T
tokens of a micro-batch (all of `training.microbatch_tokens`), h hidden size, i width of the MLP, q and k widths of all
query and all key-value heads, V vocabulary, b bytes of a number of `training.dtype`. What that leaves out is in
`MARGIN`, a share of the device's memory: the CUDA context, workspaces of libraries, buffers of collectives, graphs, and
what an allocator can't use for fragmentation. So a run that is refused can't be expected to work, and one that is
accepted may still run out of memory.

Servers take GPUs from the first one on, `tensor_parallel x data_parallel` each; ranks those after them (asynchronous
mode), or the same ones from the first on (synchronous mode). Machines have `launch.devices_per_host` GPUs each.
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
MARGIN = 0.08  # of a device's memory: what the formulas leave out
SLEEPING = 2 * GIB  # what a sleeping vLLM keeps of its GPU: context, graphs, workspaces; an assumption
ADAPTERS_HELD = 2  # by a vLLM server: the newest version's, and of requests that began with the one before
LOGITS_AT_ONCE = 1 << 27  # elements of the logits that a training pass makes at any moment, at most
_FLOAT = 4  # bytes of float32
_BUCKET = 500_000_000  # numbers that DeepSpeed reduces at once; its default
_LIVE = 1_000_000_000  # gathered numbers that ZeRO 3 may keep at once; DeepSpeed's default
_SUB_GROUP = 1_000_000_000  # weights that ZeRO 3 updates at once; DeepSpeed's default
_BATCHED_TOKENS = 8192  # of one step of vLLM on a large GPU; its default

Parts = dict[str, float]  # what needs memory -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The peak of one kind of process on one GPU."""

    who: str
    limit: float  # bytes that it may use
    parts: Parts
    field: str  # that would change it most, and what to do with it
    advice: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def excess(self) -> float:
        return max(0.0, self.total - self.limit)

    @property
    def shares(self) -> str:
        """GiB of every part."""
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a run takes of GPUs."""

    config: RunConfig
    needs: tuple[Need, ...]
    completions: int  # of full length, prompt included, that the KV cache of one server holds at once

    def table(self) -> str:
        """The plan as text, a line for each kind of process."""
        its, launch = self.config, self.config.launch
        machines = -(-launch.devices // (launch.devices_per_host or launch.devices))
        link = "then" if its.mode == "sync" else "and"
        lines = [
            f"{machines} machine{'s' * (machines > 1)}: {its.generation_servers} x {its.devices_per_server} GPUs "
            f"generate, {link} {its.training_ranks} train; the KV cache of a server holds {self.completions} "
            f"completions of {its.context} tokens"
        ]
        for need in self.needs:
            verdict = f"{need.excess / GIB:.1f} too many" if need.excess else "fits"
            lines.append(f"{need.who}: {need.total / GIB:.1f} of {need.limit / GIB:.1f} GiB, {verdict}: {need.shares}")
        return "\n".join(lines)


def check_footprint(config: RunConfig, spec: ModelSpec, memory_bytes_per_device: float) -> Footprint:
    """Raises ConfigError, one line, for what can't be placed and for the first need that does not fit: the field to
    change, what is needed, what there is, by how much that is too much, and what needs it."""
    plan = footprint(config, spec, memory_bytes_per_device)
    for need in plan.needs:
        if need.excess:
            raise ConfigError(
                f"{need.field}: {need.who} needs {need.total / GIB:.1f} GiB of {need.limit / GIB:.1f} GiB, "
                f"{need.excess / GIB:.1f} too many: {need.shares}; {need.advice}"
            )
    return plan


def footprint(config: RunConfig, spec: ModelSpec, memory_bytes_per_device: float) -> Footprint:
    """What each kind of process needs of a device. Raises ConfigError for what can't be placed."""
    check_placement(config, spec)
    memory = memory_bytes_per_device
    state, run = training_state(config, spec, reference=config.algorithm.kl_coef > 0), training_pass(config, spec)
    needs: tuple[Need, ...]
    if config.mode == "async":
        field, advice = _training_remedy(config, state, run)
        needs = (
            Need(who="rank", limit=memory, parts=_with_margin(state | run, memory), field=field, advice=advice),
            _server(config, spec, memory),
        )
    else:
        needs = (*_shared(config, spec, memory, state, run), _server(config, spec, memory))
    return Footprint(config=config, needs=needs, completions=full_completions(config, spec, memory))


def _training_remedy(config: RunConfig, state: Parts, run: Parts) -> tuple[str, str]:
    """The field that most of a rank's memory depends on, and what to do."""
    if "activations" in run and sum(run.values()) > sum(state.values()):
        if not config.training.checkpoint_activations:
            return "training.checkpoint_activations", "set it, or lower microbatch_tokens"
        return "training.microbatch_tokens", "lower it, and task.max_new_tokens where a trajectory is as long"
    if not config.training_traits.shards:
        return "training.engine", f"{names(TRAINING_ENGINES, 'shards')} shares the state out among several ranks"
    return "training.zero_stage", "raise zero_stage (to 3) or ranks, or lower microbatch_tokens"


def full_completions(config: RunConfig, spec: ModelSpec, memory: float) -> int:
    """Completions of full length, prompt included, that the KV cache of one server holds at once. vLLM's cache takes
    what is left of `generation.vllm.memory_share`; the embedded engine has one completion for every slot."""
    if not config.generation_traits.own_server:
        return config.generation.slots
    vllm = config.generation.vllm
    left = vllm.memory_share * memory - sum(_with_margin(server_state(config, spec), memory).values())
    return max(0, int(left // completion_bytes(config, spec))) * vllm.data_parallel


def _server(config: RunConfig, spec: ModelSpec, memory: float) -> Need:
    """What a server needs: it must hold one completion of full length at the least."""
    vllm = config.generation_traits.own_server
    completions = 1 if vllm else config.generation.slots
    parts = server_state(config, spec) | {"cache": completions * completion_bytes(config, spec)}
    return Need(
        who="server",
        limit=memory * (config.generation.vllm.memory_share if vllm else 1.0),
        parts=_with_margin(parts, memory),
        field="generation.vllm.tensor_parallel" if vllm else "generation.slots",
        advice="raise it, or generation.vllm.memory_share" if vllm else "lower it, or generate with vllm",
    )


def _shared(config: RunConfig, spec: ModelSpec, memory: float, state: Parts, run: Parts) -> Iterator[Need]:
    """Synchronous mode: a rank and a server on one GPU. Asleep, a vLLM server has given weights and KV cache back, but
    the rank keeps its state while the server generates; awake, both have all of theirs all the time. The embedded
    engine never gives anything back."""
    if config.generation_traits.own_server:
        served = config.generation.vllm.memory_share * memory
    else:
        served = sum(_server(config, spec, memory).parts.values()) - MARGIN * memory
    if not config.sleeps or not config.generation_traits.sleeps:
        parts, advice = _with_margin(state | run | {"server": served}, memory), "set it, with generation.engine=vllm"
        yield Need(who="rank beside a server", limit=memory, parts=parts, field="generation.sleep", advice=advice)
        return
    parts, who = state | run | {"sleeping server": SLEEPING}, "rank beside a sleeping server"
    field, advice = _training_remedy(config, state, run)
    yield Need(who=who, limit=memory, parts=_with_margin(parts, memory), field=field, advice=advice)
    parts, field = _with_margin(state | {"server": served}, memory), "generation.vllm.memory_share"
    yield Need(who="server beside a rank", limit=memory, parts=parts, field=field, advice="lower it")


def _with_margin(parts: Parts, memory: float) -> Parts:
    return parts | {"margin": MARGIN * memory}


def check_placement(config: RunConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for machines that are not filled, for servers that no machine holds as a whole or that would
    straddle two, and for heads that a tensor-parallel group can't partition. A server has no more GPUs than the run."""
    devices, per_server = config.launch.devices, config.devices_per_server
    per_host = config.launch.devices_per_host or devices
    machine = f"launch.devices_per_host ({per_host})"
    if devices > per_host:
        require(devices % per_host == 0, "launch.devices", f"a multiple of {machine}", devices)
        wanted = f"such that a server, tensor_parallel x data_parallel GPUs, does not straddle machines of {per_host}"
        require(per_host % per_server == 0, "generation.vllm.tensor_parallel", wanted, per_server)
        wanted = f"a multiple of {machine}, so that ranks fill whole machines"
        require(config.training_ranks % per_host == 0, "training.ranks", wanted, config.training_ranks)
    # As vLLM partitions them: query heads evenly; key-value heads evenly, or each to the same number of GPUs.
    degree = _degree(config)
    fits = not spec.heads % degree and not (spec.kv_heads % degree and degree % spec.kv_heads)
    wanted = (
        f"a divisor of the model's {spec.heads} heads, and a divisor or multiple of {spec.kv_heads} key-value heads"
    )
    require(fits, "generation.vllm.tensor_parallel", wanted, degree)


# -- training ----------------------------------------------------------------------------------------------------------


def training_state(config: RunConfig, spec: ModelSpec, *, reference: bool = False) -> Parts:
    """What a rank keeps from step to step. In bfloat16: weights 2 P, gradients 4 P in float32, for the optimiser 12 P,
    float32 weights and Adam's two moments.

    ZeRO stage 1 partitions the last over N ranks, 2 the gradients too, 3 the weights as well (Rajbhandari et al., 2020,
    arXiv 1910.02054, section 3.1 and Fig. 1; float32 gradients as in Table 3 of the AReaL paper). At stage 1 and in the
    torch engine a micro-batch's gradient has 2 P beside those it is added to. In float32 there is no such copy, and
    where nothing is partitioned the weights are the optimiser's own. DeepSpeed's stage 0 has the float32 weights alone,
    which layers round as they run: 2 P for the rounded ones. A reference model is a copy more on every rank.

    With an adapter of A parameters (`training.lora`) P is A in all terms but the weights of passes, which are P + A,
    and the frozen ones are the reference model too, unless they are partitioned.
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
    """Those of the adapter, or without one all. Raises ConfigError for an adapter that does not go with the model."""
    return sum(math.prod(shape) for shape in trained_shapes(spec, config.training.lora.adapter).values())


def training_pass(config: RunConfig, spec: ModelSpec) -> Parts:
    """The memory of a rank beside its state, in bytes: of a micro-batch's pass, or of an update where that takes more.

    A pass keeps the activations of all layers. With `checkpoint_activations` it keeps every layer's input, and one
    layer's activations while they are recomputed. It also needs the buffers of one layer's backward pass, or before
    that those of the output. An update keeps the float32 weights that this rank changes: 4 P over the ranks that
    share them. DeepSpeed keeps the change as well; ZeRO 3 updates a part of the weights at a time.
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
    """What the backward pass of one layer needs and `training.model.forward.decoder_layer` therefore keeps: of each of
    two norms its input and the normalised input, both in float32, and its result; rotated queries and keys, values, the
    attention's result as it comes and laid end to end; the gate, its silu, the other input of the product, and the
    product. T (2 h (8 + b) + b (3 q + 2 k + 4 i)). Norms of heads keep 8 (q + k) a token more; their result is rotated
    at once.

    (A fused norm keeps less, and so do the kernels of a core, `training.model.kernels`.)
    """
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norms = 2 * spec.hidden_size * (2 * _FLOAT + number)
    if spec.qk_norm:
        norms += (query + key) * 2 * _FLOAT
    return tokens * (norms + number * (3 * query + 2 * key + 4 * spec.intermediate_size))


def backward_buffers(spec: ModelSpec, tokens: int, number: int, *, frozen: bool = False) -> float:
    """Numbers of the gradients that the backward pass of a layer holds at once, beyond what it has freed by then.

    For each token: two as wide as the MLP and two as the hidden state. Unless the weights are frozen, also their
    gradients before these are added up."""
    weights = 0 if frozen else number * layer_parameters(spec)
    return tokens * number * (2 * spec.intermediate_size + 2 * spec.hidden_size) + weights


def head_buffers(spec: ModelSpec, tokens: int, number: int, *, frozen: bool = False) -> float:
    """The completion tokens' hidden states (at most all of them) and their gradient, the gradient of the output's
    matrix in float32 and in b, unless it is frozen, and three slices of the logits in float32
    (`training.model.forward`). transformers' module makes the logits of all tokens, and their gradient."""
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
    """DeepSpeed: two buckets of numbers whose sum over the ranks is under way, and one of them in float32. ZeRO 3 has
    gathered weights beside: those of two parts (layers, a vocabulary matrix), or as many as it may keep."""
    if not config.training_traits.shards:
        return 0.0
    number = _number(config)
    buckets = (2.0 * number + _FLOAT) * min(_BUCKET, trained_parameters(config, spec))
    layer, vocabulary = layer_parameters(spec), spec.vocab_size * spec.hidden_size
    gathered = min(spec.parameters, max(_LIVE, layer + max(layer, vocabulary)))
    return buckets + (number * gathered if config.zero_stage == 3 else 0)


def _number(config: RunConfig) -> int:
    """Bytes of a number in a pass."""
    return 2 if config.training.dtype == "bfloat16" else _FLOAT


# -- generation --------------------------------------------------------------------------------------------------------


def server_state(config: RunConfig, spec: ModelSpec) -> Parts:
    """What a server has on one GPU beside its KV cache.

    vLLM: its share of the weights; the adapters that it holds at once; the widest of a step's tensors (the MLP's gate,
    its other input and their product, and four hidden states, for the tokens of one step); the logits of every slot in
    float32, their log-probabilities and a copy. The embedded engine: two sets of weights, as one is staged while the
    other runs, and the same logits with two in float64.
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
    """Keys and values of a completion of full length, its prompt included. Of one token on one GPU of a server: 2 x
    layers x key-value heads of that GPU x their width x bytes of a number."""
    heads = max(1, spec.kv_heads // _degree(config))
    token = 2 * spec.layers * heads * spec.head_dim * _served_number(config)
    return config.context * token


def _degree(config: RunConfig) -> int:
    return config.generation.vllm.tensor_parallel if config.generation_traits.own_server else 1


def _served_number(config: RunConfig) -> int:
    """Bytes of a weight and of a number in the cache. A model's own type is taken to be a half-precision one."""
    return 2 if config.generation_traits.own_server and config.generation.vllm.dtype != "float32" else _FLOAT
