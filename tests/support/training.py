"""A tiny model and batches for tests of training; run as a module, one of two ranks on GPUs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_core.algorithm.advantages import group_advantages
from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.models.folders import ModelSpec
from areal_core.training.batching.partition import Part, PromptCost, shard
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import StepStats, TrainingBatch, build_batch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.types import GroupPayload
from tests.support import generation
from tests.support.records import credits_of, group_payload

torch.set_num_threads(1)  # as the processes of a run do; two would only wait for each other at this size

GROUPS, GROUP_SIZE = 5, 4
TRAINING = TrainingConfig(minibatches=2, learning_rate=1e-2, warmup_steps=4, weight_decay=0.1)
SPEC = replace(generation.QWEN2, hidden_size=16, kv_heads=2, head_dim=4, intermediate_size=24, context=64)
# Heads that together are wider than the hidden state; an epsilon that can be seen.
QWEN3 = replace(
    SPEC, architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, tie_embeddings=False, head_dim=6, rms_eps=1e-2
)


def weights(spec: ModelSpec = SPEC, seed: int = 0) -> dict[str, torch.Tensor]:
    return generation.weights(spec, seed, 0.3)


def payload(seed: int, completions: int = GROUP_SIZE, version: int = 0) -> GroupPayload:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, completions).astype(np.int32)
    total = int(lengths.sum())
    return group_payload(
        rng.integers(0, SPEC.vocab_size, rng.integers(1, 6)).astype(np.int32),
        lengths,
        tokens=rng.integers(0, SPEC.vocab_size, total).astype(np.int32),
        logprobs=(-3 + 0.5 * rng.normal(size=total)).astype(np.float32),
        versions=np.full(total, version, np.int32),
        truncated=rng.random(completions) < 0.3,
    )


BRANCHES = np.array([0, 0, 0, 0, 1, 2, 3])  # rollout of each sequence of a branched group


def branched(seed: int, version: int = 0) -> GroupPayload:
    """Four rollouts. The first has compacted its context, and has had two sub-agents that were asked the same: four
    sequences. An environment's message of one token is in each that has room for it. Only the third one was cut off."""
    rng = np.random.default_rng(seed)
    one = payload(seed, len(BRANCHES), version)
    ends = np.cumsum(one.lengths)
    said = np.zeros(len(one.tokens), np.bool_)
    said[(ends - one.lengths + 1)[one.lengths > 2]] = True
    mask = np.where(said, False, one.loss_mask)
    tokens = [int(mask[end - length : end].sum()) for length, end in zip(one.lengths, ends, strict=True)]
    others = [rng.integers(0, SPEC.vocab_size, length).astype(np.int32) for length in (3, 7)]
    return replace(
        one,
        prompts=(*one.prompts, *others),
        prompt_of=np.array([0, 1, 2, 2, 0, 0, 0], np.int32),
        loss_mask=mask,
        logprobs=np.where(said, 0.0, one.logprobs).astype(np.float32),
        versions=np.where(said, -1, one.versions).astype(np.int32),
        truncated=BRANCHES == 2,
        loss_tokens=np.bincount(BRANCHES, tokens)[BRANCHES].astype(np.int32),
    )


def taken(group: GroupPayload, sequences: Sequence[int]) -> GroupPayload:
    """Some of a group's sequences, as `read_group` gives them."""
    ends, chosen = np.cumsum(group.lengths), list(sequences)
    spans = [slice(ends[index] - group.lengths[index], ends[index]) for index in chosen]
    prompts, prompt_of = np.unique(group.prompt_of[chosen], return_inverse=True)

    def of_tokens(name: str) -> Any:
        return np.concatenate([getattr(group, name)[span] for span in spans])

    return GroupPayload(
        prompts=tuple(group.prompts[prompt] for prompt in prompts),
        prompt_of=prompt_of.astype(np.int32),
        lengths=group.lengths[chosen],
        truncated=group.truncated[chosen],
        loss_tokens=group.loss_tokens[chosen],
        **{name: of_tokens(name) for name in ("tokens", "loss_mask", "logprobs", "versions")},
    )


def shares_of(payloads: Mapping[int, GroupPayload], shares: Sequence[Sequence[Part]]) -> dict[int, GroupPayload]:
    """What a rank reads of some groups."""
    return {part.group: taken(payloads[part.group], part.sequences) for share in shares for part in share}


def whole(payloads: Mapping[int, GroupPayload], *shares: Sequence[int]) -> list[list[Part]]:
    """Shares that hold these groups, whole."""
    return [[Part(group, tuple(range(len(payloads[group].lengths)))) for group in share] for share in shares]


def costs_of(payloads: Mapping[int, GroupPayload]) -> list[list[PromptCost]]:
    """By tokens, all of a group as if they had the same prompt."""
    return [[PromptCost(0, group.lengths.tolist(), range(len(group.lengths)))] for group in payloads.values()]


def batch(
    step: int = 1,
    *,
    rank: int = 0,
    world_size: int = 1,
    minibatches: int = 2,
    capacity: int = 64,
    share_prompts: bool = False,
    several: bool = False,
) -> TrainingBatch:
    """`several`: rollouts have several sequences, and weigh the same."""
    drawn = branched if several else payload
    payloads = {group: drawn(100 * step + group, version=step - 1) for group in range(GROUPS)}
    shares = shard(costs_of(payloads), minibatches, world_size, seed=0, step=step)[rank]
    advantages = group_advantages([np.arange(GROUP_SIZE) % (2 + group % 2) for group in payloads])
    own = shares_of(payloads, shares)
    credits = credits_of(advantages[:, BRANCHES] if several else advantages, list(payloads.values()))
    algorithm = AlgorithmConfig(loss_mean="sequence" if several else "token")
    return build_batch(step, shares, own, credits, capacity=capacity, algorithm=algorithm, share_prompts=share_prompts)


def engine(
    training: TrainingConfig = TRAINING, algorithm: AlgorithmConfig | None = None, spec: ModelSpec = SPEC
) -> TorchEngine:
    return TorchEngine(spec, weights(spec), training, algorithm or AlgorithmConfig())


def train(engine: TorchEngine, steps: range, rank: int = 0, world_size: int = 1) -> list[StepStats]:
    stats: list[StepStats] = []
    for step in steps:
        share = batch(step, rank=rank, world_size=world_size)
        stats.append(engine.train_step(share, engine.proximal_logprobs(share)))
    return stats


def numbers(stats: StepStats) -> dict[str, float | None]:
    """All that a step reports, by name."""
    values = asdict(stats)
    return values.pop("metrics") | values


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    ranks = RankGroup(rank, 2, rendezvous=folder / "rendezvous", timeout_s=60, backend="cpu:gloo,cuda:nccl")
    one = TorchEngine(SPEC, weights(), TRAINING, AlgorithmConfig(), ranks=ranks, device="cuda")
    train(one, range(1, 4), rank, 2)
    np.savez(folder / f"rank-{rank}.npz", **one.weights())  # type: ignore[arg-type]
    ranks.close()
