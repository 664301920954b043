"""Every training engine through the same steps, as one of the ranks of a group."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.errors import DivergenceError
from areal_core.models.spec import ModelSpec
from areal_core.models.tensorfile import to_bfloat16
from areal_core.training.distributed.ranks import RankGroup
from areal_core.training.engines.engine import StepStats
from areal_core.training.engines.policy_engine import PolicyEngine
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.types import Float32Array
from tests.support.lora import LORA
from tests.support.training import QWEN3, SPEC, TRAINING, batch, weights
from tests.support.transformers_models import run_by_transformers

STEPS = range(1, 4)
CASES: dict[str, dict[str, Any]] = {  # arguments of `trained`
    "torch": {},
    "torch, a completion or a few in a micro-batch": {"capacity": 20},
    "torch, a rank without work": {"minibatches": 5},
    "torch by transformers": {"transformers": True},
    "torch in bfloat16": {"dtype": "bfloat16"},
    "zero 0": {"stage": 0},
    "zero 1, a rank without work": {"stage": 1, "minibatches": 5},
    "zero 2, small micro-batches": {"stage": 2, "capacity": 20},
    "zero 2 by transformers": {"stage": 2, "transformers": True},
    "zero 2 in bfloat16": {"stage": 2, "dtype": "bfloat16"},
    "zero 3, activations recomputed": {"stage": 3, "checkpoint_activations": True, "temperature": 0.7},
    "zero 3 of Qwen3": {"stage": 3, "spec": QWEN3},
    "zero 3 in bfloat16": {"stage": 3, "dtype": "bfloat16"},
    "zero 2 with an adapter": {"stage": 2, "lora": LORA},
    "zero 3 with an adapter, by transformers": {"stage": 3, "lora": LORA, "transformers": True},
    "torch, rollouts of several sequences": {"several": True, "capacity": 24},
    "zero 2, rollouts of several sequences": {"stage": 2, "several": True, "capacity": 24},
}


def made(
    spec: ModelSpec = SPEC,
    *,
    ranks: RankGroup | None = None,
    stage: int | None = None,
    transformers: bool = False,
    temperature: float = 1.0,
    algorithm: AlgorithmConfig | None = None,
    **fields: Any,
) -> PolicyEngine:
    """An engine with its ZeRO stage, or None for the torch engine."""
    training: TrainingConfig = replace(TRAINING, **fields)
    sampled: dict[str, Any] = {"ranks": ranks or RankGroup(), "temperature": temperature}
    spec, algorithm = run_by_transformers(spec) if transformers else spec, algorithm or AlgorithmConfig()
    if stage is None:
        return TorchEngine(spec, weights(spec), training, algorithm, **sampled)
    from areal_core.training.engines.deepspeed_engine import DeepSpeedEngine  # takes seconds

    gc.freeze()  # DeepSpeed collects garbage several times an engine, through all that is imported
    training = replace(training, engine="deepspeed", zero_stage=stage)
    return DeepSpeedEngine(spec, weights(spec), training, algorithm, **sampled)


def trained(
    ranks: RankGroup, *, capacity: int = 10_000, minibatches: int = 2, several: bool = False, **engine: Any
) -> tuple[list[StepStats], dict[str, Float32Array]]:
    """What an engine reports of its steps, and the weights that it then has and serves, on rank 0 alone."""
    one, stats = made(ranks=ranks, **engine), []
    for step in STEPS:
        share = batch(
            step,
            rank=ranks.rank,
            world_size=ranks.size,
            minibatches=minibatches,
            capacity=capacity,
            share_prompts=capacity < 10_000,
            several=several,
        )
        stats.append(one.train_step(share, one.proximal_logprobs(share)))
    found, served = one.weights(), one.served()
    assert served.keys() == (found.keys() if ranks.rank == 0 else set())
    for name, values in served.items():
        half = values.dtype == np.uint16
        np.testing.assert_array_equal(values, to_bfloat16(found[name]) if half else found[name])
    return stats, found


def diverged(ranks: RankGroup, stage: int) -> tuple[str, bool]:
    """The error where one rank has a token that is not a number, and whether weights have changed."""
    one = made(ranks=ranks, stage=stage)
    before = one.weights()
    share = batch(9, rank=ranks.rank, world_size=ranks.size, minibatches=1)
    proximal, broken = one.proximal_logprobs(share), share.behaviour_logprobs.copy()
    if ranks.rank == 0:
        broken[np.flatnonzero(share.loss_mask & (share.advantages != 0))[0]] = np.nan
    try:
        one.train_step(replace(share, behaviour_logprobs=broken), proximal)
    except DivergenceError as error:
        after = one.weights()
        return str(error), any((values != after[name]).any() for name, values in before.items())
    return "", True


def run(rank: int, size: int, folder: Path) -> None:
    """One rank, through all cases; its outcomes are left in `folder`."""
    ranks = RankGroup(rank, size, rendezvous=folder / "rendezvous", timeout_s=60)
    seen = {name: trained(ranks, **case) for name, case in CASES.items()}
    errors = {stage: diverged(ranks, stage) for stage in (0, 3)}
    (folder / f"rank-{rank}").write_bytes(pickle.dumps((seen, errors)))
    ranks.close()
