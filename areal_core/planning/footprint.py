"""How much memory a run needs of every GPU, by arithmetic: what can't fit is refused before anything starts.

For each kind of process its peak on one GPU, in the terms of `areal_core.planning.memory`, which counts tensors. What
that leaves out is in `MARGIN`, a share of the device's memory: the CUDA context, workspaces of libraries, buffers of
collectives, graphs, and what an allocator can't use for fragmentation. So a run that is refused can't be expected to
work, and one that is accepted may still run out of memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from areal_core.config.engines import TRAINING_ENGINES, names
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError
from areal_core.models.spec import ModelSpec
from areal_core.planning.memory import Parts, completion_bytes, server_state, training_pass, training_state
from areal_core.planning.placement import check_placement

GIB = 2**30
MARGIN = 0.08  # of a device's memory: what the formulas leave out
SLEEPING = 2 * GIB  # what a sleeping vLLM keeps of its GPU: context, graphs, workspaces; an assumption


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
    completions: int  # of full length that the KV cache of one server holds at once
    context: int  # tokens of such a completion, its prompt included

    def table(self) -> str:
        """The plan as text, a line for each kind of process."""
        its, launch = self.config, self.config.launch
        machines = -(-launch.devices // (launch.devices_per_host or launch.devices))
        link = "then" if its.mode == "sync" else "and"
        lines = [
            f"{machines} machine{'s' * (machines > 1)}: {its.generation_servers} x {its.devices_per_server} GPUs "
            f"generate, {link} {its.training_ranks} train; the KV cache of a server holds {self.completions} "
            f"completions of {self.context} tokens"
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
    context = config.task.max_prompt_tokens + config.task.max_new_tokens
    state, run = training_state(config, spec, reference=config.algorithm.kl_coef > 0), training_pass(config, spec)
    needs: tuple[Need, ...]
    if config.mode == "async":
        field, advice = _training_remedy(config, spec, state, run, memory * (1 - MARGIN))
        needs = (
            Need(who="rank", limit=memory, parts=_with_margin(state | run, memory), field=field, advice=advice),
            _server(config, spec, memory),
        )
    else:
        needs = (*_shared(config, spec, memory, state, run), _server(config, spec, memory))
    return Footprint(
        config=config,
        needs=needs,
        completions=full_completions(config, spec, memory),
        context=context,
    )


def _training_remedy(config: RunConfig, spec: ModelSpec, state: Parts, run: Parts, available: float) -> tuple[str, str]:
    """The field that most of the memory depends on, and what to do. `available` are bytes of a rank."""
    training, prompt = config.training, config.task.max_prompt_tokens
    longest = prompt + config.task.max_new_tokens
    in_pass = "activations" in run
    if in_pass and sum(run.values()) > sum(state.values()):
        if not training.checkpoint_activations:
            return "training.checkpoint_activations", "set it, or lower microbatch_tokens"
        fitting = _fitting_tokens(config, spec, available - sum(state.values()))
        if fitting >= longest:
            return "training.microbatch_tokens", f"lower it, to {fitting} at the most and {longest} at the least"
        if fitting > prompt:
            return "task.max_new_tokens", (
                f"one rank holds a trajectory of {longest} tokens, prompt included, as a whole: at most {fitting} fit; "
                f"lower it to {fitting - prompt}, and training.microbatch_tokens to {fitting}"
            )
    if not config.training_traits.shards:
        sharding = names(TRAINING_ENGINES, "shards")
        return (
            "training.engine",
            f"every rank of {training.engine} has all of it; {sharding} shares it out among several",
        )
    less = " or lower microbatch_tokens" if in_pass else ""
    if training.zero_stage < 3:
        return "training.zero_stage", f"raise zero_stage or ranks{less}"
    return "training.ranks", f"raise ranks{less}"


def _fitting_tokens(config: RunConfig, spec: ModelSpec, available: float) -> int:
    """Tokens of the largest micro-batch, up to the one that is set, whose pass takes at most `available` bytes."""

    def needed(tokens: int) -> float:
        chosen = replace(config, training=replace(config.training, microbatch_tokens=tokens))
        return sum(training_pass(chosen, spec).values())

    return bisect_right(range(1, config.training.microbatch_tokens + 1), available, key=needed)


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
    field, advice = _training_remedy(config, spec, state, run, memory * (1 - MARGIN) - SLEEPING)
    yield Need(who=who, limit=memory, parts=_with_margin(parts, memory), field=field, advice=advice)
    parts, field = _with_margin(state | {"server": served}, memory), "generation.vllm.memory_share"
    yield Need(who="server beside a rank", limit=memory, parts=parts, field=field, advice="lower it")


def _with_margin(parts: Parts, memory: float) -> Parts:
    return parts | {"margin": MARGIN * memory}
