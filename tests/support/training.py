"""A tiny model and batches for tests of training; run as a module, one rank of a data-parallel group."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_core.algorithm.advantages import group_advantages
from areal_core.config.schema import AlgorithmConfig, TrainingConfig
from areal_core.models.folders import ModelSpec, init_weights
from areal_core.training.batching.partition import GroupCost, Part, shard
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import StepStats, TrainingBatch, build_batch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.types import GroupPayload

torch.set_num_threads(1)  # as the processes of a run do; two would only wait for each other at this size

GROUPS, GROUP_SIZE = 5, 4
TRAINING = TrainingConfig(minibatches=2, learning_rate=1e-2, warmup_steps=4, weight_decay=0.1)
SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM",
    vocab_size=23,
    hidden_size=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    rope_theta=10000.0,
    rms_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    context=64,
    eos_token_ids=(1,),
)
# Heads that together are wider than the hidden state; an epsilon that can be seen.
QWEN3 = replace(
    SPEC, architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, tie_embeddings=False, head_dim=6, rms_eps=1e-2
)


def weights(spec: ModelSpec = SPEC, seed: int = 0) -> dict[str, torch.Tensor]:
    """Large enough that no two tokens are alike, biases included."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in init_weights(spec, seed).items()
    }


def payload(seed: int, completions: int = GROUP_SIZE, version: int = 0) -> GroupPayload:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, completions).astype(np.int32)
    total = int(lengths.sum())
    return GroupPayload(
        prompt_tokens=rng.integers(0, SPEC.vocab_size, rng.integers(1, 6)).astype(np.int32),
        lengths=lengths,
        tokens=rng.integers(0, SPEC.vocab_size, total).astype(np.int32),
        loss_mask=np.ones(total, np.bool_),
        logprobs=(-3 + 0.5 * rng.normal(size=total)).astype(np.float32),
        versions=np.full(total, version, np.int32),
        truncated=rng.random(completions) < 0.3,
    )


def taken(group: GroupPayload, completions: Sequence[int]) -> GroupPayload:
    """Some of a group's completions."""
    ends = np.cumsum(group.lengths)
    spans = [slice(ends[index] - group.lengths[index], ends[index]) for index in completions]

    def of_tokens(name: str) -> Any:
        return np.concatenate([getattr(group, name)[span] for span in spans])

    return GroupPayload(
        prompt_tokens=group.prompt_tokens,
        lengths=group.lengths[list(completions)],
        truncated=group.truncated[list(completions)],
        **{name: of_tokens(name) for name in ("tokens", "loss_mask", "logprobs", "versions")},
    )


def shares_of(payloads: Mapping[int, GroupPayload], shares: Sequence[Sequence[Part]]) -> dict[int, GroupPayload]:
    """What a rank reads of some groups."""
    return {part.group: taken(payloads[part.group], part.completions) for share in shares for part in share}


def whole(payloads: Mapping[int, GroupPayload], *shares: Sequence[int]) -> list[list[Part]]:
    """Shares that hold these groups, whole."""
    return [[Part(group, tuple(range(len(payloads[group].lengths)))) for group in share] for share in shares]


def batch(
    step: int = 1,
    *,
    rank: int = 0,
    world_size: int = 1,
    minibatches: int = 2,
    capacity: int = 64,
    share_prompts: bool = False,
) -> TrainingBatch:
    payloads = {group: payload(100 * step + group, version=step - 1) for group in range(GROUPS)}
    costs = [GroupCost(0, group.lengths.tolist()) for group in payloads.values()]
    shares = shard(costs, minibatches, world_size, seed=0, step=step)[rank]
    advantages = group_advantages([np.arange(GROUP_SIZE) % (2 + group % 2) for group in payloads])
    return build_batch(
        step,
        shares,
        shares_of(payloads, shares),
        advantages,
        capacity=capacity,
        share_prompts=share_prompts,
    )


def engine(
    training: TrainingConfig = TRAINING, algorithm: AlgorithmConfig | None = None, spec: ModelSpec = SPEC
) -> TorchEngine:
    return TorchEngine(spec, weights(spec), training, algorithm or AlgorithmConfig())


def train(
    engine: TorchEngine, steps: range, rank: int = 0, world_size: int = 1, minibatches: int = 2
) -> list[StepStats]:
    stats: list[StepStats] = []
    for step in steps:
        share = batch(step, rank=rank, world_size=world_size, minibatches=minibatches)
        stats.append(engine.train_step(share, engine.proximal_logprobs(share)))
    return stats


def numbers(stats: StepStats) -> dict[str, float | None]:
    """All that a step reports, by name."""
    values = asdict(stats)
    return values.pop("metrics") | values


def run_rank(rank: int, world_size: int, minibatches: int, steps: int, folder: Path, device: str = "cpu") -> None:
    """Train some steps as rank `rank`, and leave its weights and stats in `folder`."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    one = TorchEngine(
        SPEC,
        weights(),
        TRAINING,
        AlgorithmConfig(),
        ranks=RankGroup(rank, world_size, rendezvous=folder / "rendezvous", timeout_s=60, backend=backend),
        device=device,
    )
    stats = train(one, range(1, steps + 1), rank, world_size, minibatches)
    np.savez(folder / f"rank-{rank}.npz", stats=repr(stats), **one.weights())  # type: ignore[arg-type]
    one.ranks.close()
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], "the group's threads outlive it"


if __name__ == "__main__":
    rank, world_size, minibatches, steps = map(int, sys.argv[1:5])
    run_rank(rank, world_size, minibatches, steps, Path(sys.argv[5]), *sys.argv[6:])
