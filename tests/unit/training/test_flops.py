"""The arithmetic of a batch, by hand and against what torch counts of the real passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_core.spec import ModelSpec
from areal_core.training.flops import forward_flops, peak_flops_per_s, step_flops, training_cost
from areal_core.training.forward import answer_logprobs
from areal_core.training.packing import pack
from tests.support.training import SPEC, batch, weights

LENGTHS, PROMPTS = [4, 7, 4, 12], [1, 3, 2, 5]
TARGETS = sum(LENGTHS) - sum(PROMPTS)
ATTENDED = 3 * 4 / 2 + 6 * 7 / 2 + 3 * 4 / 2 + 11 * 12 / 2
UNTIED = replace(SPEC, architecture="LlamaForCausalLM", qkv_bias=False, tie_embeddings=False, kv_heads=4, head_dim=8)


def counted(spec: ModelSpec) -> tuple[float, float]:
    """What torch counts of the products with weights, forward and backward; attention is not among them."""
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, sum(LENGTHS)).astype(np.int32)
    packed = pack(tokens, np.array(LENGTHS), np.array(PROMPTS), range(4))
    leaves = {name: tensor.requires_grad_() for name, tensor in weights(spec).items()}

    def products(counter: FlopCounterMode) -> float:
        return float(
            sum(counter.get_flop_counts()["Global"].get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
        )

    with FlopCounterMode(display=False) as forward:
        logprobs, _ = answer_logprobs(spec, leaves, packed)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    return products(forward), products(backward)


@pytest.mark.parametrize("spec", [SPEC, UNTIED], ids=lambda spec: spec.architecture)
def test_products_are_those_that_torch_counts(spec: ModelSpec) -> None:
    attention = 4 * spec.layers * spec.heads * spec.head_dim * ATTENDED
    forward, backward = counted(spec)
    assert forward_flops(spec, LENGTHS, TARGETS) - attention == forward
    # The backward pass makes the logits again, which torch counts and model FLOPs don't, and adds a product of the same
    # size to the head's gradient in place, which model FLOPs count and torch doesn't.
    assert training_cost(spec, LENGTHS, TARGETS) - 3 * attention == forward + backward


def test_attention_is_causal() -> None:
    """Scores and their product with values, two operations each, over every pair that the mask leaves."""
    one, no = SPEC, replace(SPEC, layers=0)
    pairs = [(query, key) for query in range(9) for key in range(9) if key <= query]
    layers = forward_flops(one, [10]) - forward_flops(no, [10])
    matrices = 2 * 9 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) * SPEC.layers  # q, o; k, v; gate, up, down
    assert layers - matrices == 2 * 2 * SPEC.layers * SPEC.heads * SPEC.head_dim * len(pairs)


def test_a_step_is_its_passes() -> None:
    share = batch(capacity=40)
    share = replace(share, advantages=np.where(np.repeat(np.arange(20) % 3 == 0, share.lengths), 0, share.advantages))
    packs = [packed for cut in share.microbatches for packed in cut]
    lengths = [length + 1 for packed in packs for count, length in packed.blocks for _ in range(count)]
    assert 0 < len(lengths) < len(share.lengths)
    forward = forward_flops(SPEC, lengths, sum(len(packed.rows) for packed in packs))
    assert step_flops(SPEC, share, forward_passes=0) == 3 * forward
    assert step_flops(SPEC, share, forward_passes=1) == 4 * forward


def test_a_long_answer_costs_more_than_its_tokens() -> None:
    assert training_cost(SPEC, [1001]) > training_cost(SPEC, [501, 501])
    assert training_cost(SPEC, [1001, 7]) == training_cost(SPEC, [1001]) + training_cost(SPEC, [7])


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
