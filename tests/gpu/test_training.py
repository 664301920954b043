"""The torch engine on a GPU: what it computes is what a CPU computes, in float32, and near it in bfloat16.

Needs torch, numpy, safetensors and pytest alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_core.config.groups import TrainingConfig
from areal_core.config.schema import AlgorithmConfig
from areal_core.training.batching.packing import Block
from areal_core.training.engines.engine import TrainingBatch
from areal_core.training.engines.torch_engine import TorchEngine
from areal_core.training.model import operations
from areal_core.training.model.operations import attention_by_block, causal_attention
from tests.support.generation import weights
from tests.support.training import SPEC, engine, train

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch wants it for sums in a fixed order
DEVICE = "cuda"
MEDIUM = replace(SPEC, vocab_size=1000, hidden_size=256, layers=4, head_dim=64, intermediate_size=512, context=1024)
# With a large epsilon Adam's step is as smooth in the gradient as comparisons need.
TRAINING = TrainingConfig(minibatches=1, learning_rate=1e-3, adam_eps=1.0)
HALF = replace(TRAINING, dtype="bfloat16")
BOTH = pytest.mark.parametrize("training", [TRAINING, HALF], ids=lambda training: training.dtype)


@pytest.fixture
def fixed_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def batch(sequences: int = 24, capacity: int = 4096) -> TrainingBatch:
    """Long-tailed completions of short prompts, one minibatch."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 40, sequences).astype(np.int32)
    completions = np.clip(rng.lognormal(5.0, 0.9, sequences), 2, 900).astype(np.int32)
    sampled = np.repeat(np.tile([False, True], sequences), np.stack((prompts, completions), axis=1).ravel())
    total = len(sampled)
    return TrainingBatch(
        step=1,
        tokens=rng.integers(0, MEDIUM.vocab_size, total).astype(np.int32),
        lengths=prompts + completions,
        prompt_lengths=prompts,
        loss_mask=sampled,
        behaviour_logprobs=np.where(sampled, -7 + 0.3 * rng.normal(size=total), 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        advantages=np.where(sampled, np.repeat(rng.normal(size=sequences), prompts + completions), 0).astype(
            np.float32
        ),
        weights=sampled.astype(np.float32),
        denominator_terms=completions.astype(np.float64),
        minibatches=(tuple(range(sequences)),),
        capacity=capacity,
    )


def made(training: TrainingConfig, device: str = DEVICE) -> TorchEngine:
    return TorchEngine(MEDIUM, weights(MEDIUM, 0, 0.03), training, AlgorithmConfig(), device=device)


def first_moments(one: TorchEngine) -> dict[str, np.ndarray]:
    """The gradient of the first update, times a constant."""
    return {name: array for name, array in one.state().arrays.items() if name.startswith("exp_avg/")}


def test_a_float32_step_is_that_of_a_cpu():
    share = batch()
    cpu, gpu = made(TRAINING, "cpu"), made(TRAINING)
    proximal = cpu.logprobs(share)
    np.testing.assert_allclose(gpu.logprobs(share), proximal, atol=1e-4)
    expected, stats = cpu.train_step(share, proximal), gpu.train_step(share, proximal)
    assert stats.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    assert stats.metrics["policy/entropy"] == pytest.approx(expected.metrics["policy/entropy"], rel=1e-4)
    ours = first_moments(gpu)
    for name, values in first_moments(cpu).items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-3 * np.abs(values).max(), err_msg=name)
    for name, values in cpu.weights().items():
        np.testing.assert_allclose(gpu.weights()[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("width", [64, 128])
def test_sequences_of_any_length_at_once(kv_heads: int, width: int):
    """The kernel in bfloat16 against one call a length in float32, outputs and gradients."""
    blocks = tuple(Block(*each) for each in ((3, 1), (2, 17), (1, 64), (2, 129), (1, 1000)))
    generator = torch.Generator().manual_seed(0)
    total = sum(count * length for count, length, _ in blocks)
    single = [
        torch.randn(total, heads, width, generator=generator).bfloat16().float().to(DEVICE).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in single]
    assert operations.has_kernel(half[0])
    expected, got = attention_by_block(*single, blocks), causal_attention(*half, blocks)
    torch.testing.assert_close(got.float(), expected, atol=0.02, rtol=0.02)
    upstream = torch.randn(expected.shape, generator=generator).to(DEVICE)
    gradients = torch.autograd.grad(got, half, upstream.bfloat16())
    for one, other in zip(gradients, torch.autograd.grad(expected, single, upstream), strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one.float(), other, atol=0.02 * scale, rtol=0.05)


@BOTH
def test_in_a_fixed_order_the_same_batch_gives_the_same_bits(training: TrainingConfig, fixed_order: None):
    """Without torch.use_deterministic_algorithms a GPU adds up some gradients in whatever order they come."""
    share = batch()
    one, other = made(training), made(training)
    assert one.logprobs(share).tobytes() == other.logprobs(share).tobytes()
    for trained in (one, other):
        trained.train_step(share, trained.logprobs(share))
    for name, values in one.weights().items():
        assert values.tobytes() == other.weights()[name].tobytes(), name


@BOTH
def test_a_state_goes_from_a_gpu_to_a_cpu_and_back(training: TrainingConfig):
    share = batch()
    first, second = made(training), made(training)
    first.train_step(share, first.logprobs(share))
    cpu = made(training, "cpu")
    cpu.load_state(first.state())
    second.load_state(cpu.state())
    for name, values in first.state().arrays.items():
        assert values.tobytes() == second.state().arrays[name].tobytes(), name
    np.testing.assert_allclose(second.logprobs(share), first.logprobs(share), atol=1e-5)


def test_two_ranks_over_nccl_give_what_one_gives(tmp_path: Path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank: two, and there is one")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.training", str(rank), str(tmp_path)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    alone = engine()
    train(alone, range(1, 4))
    for rank in range(2):
        saved = np.load(tmp_path / f"rank-{rank}.npz")
        for name, values in alone.weights().items():
            np.testing.assert_allclose(saved[name], values, rtol=0, atol=1e-3 * np.abs(values).max(), err_msg=name)
