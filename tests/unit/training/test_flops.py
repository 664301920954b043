"""Model FLOPs of a batch, by hand and against what torch counts of the real passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_core.models.spec import ModelSpec
from areal_core.training.batching.packing import Packed, pack, pack_shared
from areal_core.training.batching.partition import GroupCost
from areal_core.training.flops import forward_flops, peak_flops_per_s, step_flops, training_cost
from areal_core.training.model.forward import completion_logprobs
from tests.support.training import SPEC, batch, weights

LENGTHS, PROMPTS = [4, 7, 4, 12], [1, 3, 2, 5]
TARGETS = sum(LENGTHS) - sum(PROMPTS)
# Every input attends to itself and to those before it: as whole sequences, and as two groups of two whose prompts of 3
# and 5 tokens are shared.
ATTENDED = 3 * 4 / 2 + 6 * 7 / 2 + 3 * 4 / 2 + 11 * 12 / 2
PAIRED = [(3, [4, 2]), (5, [7, 1])]
PAIRED_ATTENDED = (1 + 2 + 3) + (4 + 5 + 6) + 4 + (1 + 2 + 3 + 4 + 5) + (6 + 7 + 8 + 9 + 10 + 11)
UNTIED = replace(SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False, kv_heads=4, head_dim=8)


def counted(spec: ModelSpec, packed: Packed) -> tuple[float, float]:
    """What torch counts of the products with weights, forward and backward; attention is not among them."""
    leaves = {name: tensor.requires_grad_() for name, tensor in weights(spec).items()}

    def products(counter: FlopCounterMode) -> float:
        return float(
            sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
        )

    with FlopCounterMode(display=False) as forward:
        logprobs, _ = completion_logprobs(spec, leaves, packed)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    return products(forward), products(backward)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("spec", [SPEC, UNTIED], ids=lambda spec: spec.architecture)
def test_products_are_those_that_torch_counts(spec: ModelSpec, shared: bool) -> None:
    groups = PAIRED if shared else [(p, [length - p]) for p, length in zip(PROMPTS, LENGTHS, strict=True)]
    prompts = np.array([prompt for prompt, completions in groups for _ in completions])
    lengths = prompts + np.array([completion for _, completions in groups for completion in completions])
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, lengths.sum()).astype(np.int32)
    laid = tokens, lengths, prompts
    forward, backward = counted(spec, pack_shared(*laid, [[0, 1], [2, 3]]) if shared else pack(*laid, range(4)))
    attention = 4 * spec.layers * spec.heads * spec.head_dim * (PAIRED_ATTENDED if shared else ATTENDED)
    passes = [forward_flops(spec, *group, shared=shared) for group in groups]
    costs = [total(training_cost(spec, *group, shared=shared)) for group in groups]
    assert sum(passes) - attention == forward
    # The backward pass makes the logits again, which torch counts and model FLOPs don't, and adds a product of the same
    # size to the head's gradient in place, which model FLOPs count and torch doesn't.
    assert sum(costs) - 3 * attention == forward + backward


def test_attention_is_causal() -> None:
    """Scores and their product with values, two operations each, over every pair that the mask leaves."""
    one, no = SPEC, replace(SPEC, layers=0)
    pairs = [(query, key) for query in range(9) for key in range(9) if key <= query]
    layers = forward_flops(one, 1, [9], shared=False) - forward_flops(no, 1, [9], shared=False)
    matrices = 2 * 9 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) * SPEC.layers  # q, o; k, v; gate, up, down
    assert layers - matrices == 2 * 2 * SPEC.layers * SPEC.heads * SPEC.head_dim * len(pairs)


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_is_its_passes(shared: bool) -> None:
    """Three of four parts of the first minibatch and of the second; pi_prox is recomputed of the second alone."""
    share = batch(capacity=40, share_prompts=shared)
    share = replace(share, advantages=np.where(np.repeat(np.arange(20) % 3 == 0, share.lengths), 0, share.advantages))
    whole = replace(share, capacity=10_000)  # no group is cut
    first, second = (sum(map(passed, cut)) for cut in whole.microbatches)
    assert first > 0 < second
    assert step_flops(SPEC, share, proximal=False, reference=False) == 3 * (first + second)
    assert step_flops(SPEC, share, proximal=True, reference=False) == 3 * (first + second) + second
    assert step_flops(SPEC, share, proximal=True, reference=True) == 4 * (first + second) + second


def passed(packed: Packed) -> float:
    """FLOPs of a forward pass over a pack: its inputs through the layers, its targets through the head."""
    bare = replace(SPEC, layers=0)
    prompts = [block.tokens for block in packed.blocks if block.prompt is None for _ in range(block.sequences)]
    attended = sum(
        block.sequences * block.tokens * ((prompts[block.prompt] if block.prompt is not None else 0)
                                          + (block.tokens + 1) / 2)
        for block in packed.blocks
    )  # fmt: skip
    matrices = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) * SPEC.layers
    head = forward_flops(bare, 1, [1], shared=False) * len(packed.rows)
    return len(packed.inputs) * matrices + 4 * SPEC.layers * SPEC.heads * SPEC.head_dim * attended + head


def total(cost: GroupCost) -> float:
    return cost.prompt + sum(cost.completions)


def test_a_long_completion_costs_more_than_its_tokens() -> None:
    def cost(*completions: int, shared: bool = False) -> int:
        return total(training_cost(SPEC, 1, completions, shared=shared))

    assert cost(1000) > cost(500, 501)
    assert cost(1000, 6) == cost(1000) + cost(6)


def test_what_is_shared_costs_once() -> None:
    alone, twice = (training_cost(SPEC, 300, completions, shared=True) for completions in ([9], [9, 9]))
    assert total(alone) == total(training_cost(SPEC, 300, [9], shared=False))
    assert total(twice) < 1.1 * total(alone)
    assert alone.prompt == twice.prompt > 9 * alone.completions[0] / 10


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H800", 989e12, 67e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
    ],
)
def test_data_sheets(name: str, bfloat16: float, float32: float) -> None:
    assert peak_flops_per_s(name, "bfloat16") == bfloat16
    assert peak_flops_per_s(name, "float32") == float32


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_what_no_data_sheet_is_here_for_has_no_peak(name: str) -> None:
    assert peak_flops_per_s(name, "bfloat16") is None


def test_frozen_weights_have_no_gradient() -> None:
    one = batch(minibatches=1)
    whole = step_flops(SPEC, one, proximal=False, reference=False)
    products = sum(
        forward_flops(SPEC, int(prompt), [int(length - prompt)], shared=False, attention=False)
        for length, prompt, trained in zip(one.lengths, one.prompt_lengths, one.has_gradient, strict=True)
        if trained
    )
    assert 0 < products < whole / 3
    assert step_flops(SPEC, one, proximal=False, reference=False, frozen=True) == whole - products
