"""The CPU kernels against the same in float64, with autograd's gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.training.batching.packing import Block, Blocks
from areal_core.training.model.attention import attention_by_block, causal_attention
from areal_core.training.model.pointwise import rotate, swiglu

EPS = float(np.finfo(np.float32).eps)
BLOCKS: dict[str, Blocks] = {
    "one-token": (Block(1, 1),),
    "whole": (Block(3, 2), Block(1, 5), Block(2, 17), Block(1, 100)),
    # Prompts of 1, 9 and 40 tokens; completions that end before, at and behind the end of a vector and of a tile.
    "shared": (
        *(Block(1, 1), Block(1, 9), Block(1, 40)),
        *(Block(2, 1, 0), Block(1, 15, 0), Block(2, 6, 1), Block(1, 7, 1), Block(1, 24, 1), Block(3, 25, 2)),
        *(Block(1, 130, 2),),
    ),
}
HEADS = {"default": (4, 4, 16), "grouped": (6, 2, 64), "one-for-all": (5, 1, 24), "narrow": (2, 2, 4)}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_rounded(got: Tensor, exact: Tensor, products: int) -> None:
    """Sums of so many products, of numbers that are rounded themselves: by each sum's own size it may be off without
    bound, by the size of all of them it is not."""
    error = (got.double() - exact).norm() / exact.norm()
    assert error <= 2 * products**0.5 * EPS, f"{float(error):.2g}"


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_attention_and_its_gradients(blocks: Blocks, heads: tuple[int, int, int]):
    query_heads, kv_heads, width = heads
    tokens = sum(block.sequences * block.tokens for block in blocks)
    inputs = [drawn(tokens, count, width, seed=count) for count in (query_heads, kv_heads, kv_heads + 7)]
    inputs[2] = inputs[2][:, :kv_heads]  # not contiguous
    upstream = drawn(tokens, query_heads, width, seed=99)
    exact = doubles(*inputs)
    expected = attention_by_block(*exact, blocks)
    inputs = [each.requires_grad_() for each in inputs]
    got = causal_attention(*inputs, blocks)
    assert_rounded(got, expected, width)
    for one, other in zip(
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    ):
        if tokens > 1:  # else the weight is 1, and only the value has a gradient
            assert_rounded(one, other, width + tokens)


def test_attention_sees_nothing_of_what_comes_later_or_of_others():
    blocks = BLOCKS["shared"]
    tokens = sum(block.sequences * block.tokens for block in blocks)
    inputs = [drawn(tokens, 2, 16, seed=seed) for seed in range(3)]
    before = causal_attention(*inputs, blocks)
    for changed in inputs[1:]:
        changed[30] = 1e6  # in the middle of the last prompt
    same = (causal_attention(*inputs, blocks) == before).all(-1).all(-1)
    completions = tokens - 3 * 25 - 130  # where those begin that attend to it
    sees = np.zeros(tokens, np.bool_)
    sees[30:50] = sees[completions:] = True
    assert (same.numpy() != sees).all()


def test_attention_to_scores_that_differ_widely():
    """By far the largest score takes all; one below it by more than an exponent holds weighs nothing."""
    query, key = torch.full((40, 1, 16), 100.0), torch.linspace(-100, 100, 40)[:, None, None].repeat(1, 1, 16)
    value = drawn(40, 1, 16, seed=0).requires_grad_()
    got = causal_attention(query, key, value, (Block(1, 40),))
    assert torch.equal(got, value)
    (gradient,) = torch.autograd.grad(got.sum(), value)
    assert torch.equal(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize("width", [4, 16, 24, 32, 64])
def test_rotation(width: int):
    angles = drawn(33, 1, width // 2, seed=1).repeat(1, 1, 2)
    cos, sin, x = angles.cos(), angles.sin(), drawn(33, 3, width, seed=2).requires_grad_()
    (exact,) = doubles(x)
    expected, got = rotate(exact, cos.double(), sin.double()), rotate(x, cos, sin)
    assert_rounded(got, expected, 2)
    (back,) = torch.autograd.grad(got, x, got)
    assert_rounded(back, exact, 8)


@pytest.mark.parametrize("width", [1, 16, 37, 192])
def test_gate(width: int):
    gate, up = (drawn(5, width, seed=seed) * 20 for seed in (1, 2))
    gate[0, 0], gate[1, 0], gate[2, 0] = -150.0, 150.0, 0.0
    exact = doubles(gate, up)
    expected = F.silu(exact[0]) * exact[1]
    inputs = [each.requires_grad_() for each in (gate, up)]
    got, upstream = swiglu(*inputs), drawn(5, width, seed=3)
    torch.testing.assert_close(got.double(), expected, rtol=16 * EPS, atol=1e-30)
    gradients = torch.autograd.grad(got, inputs, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for one, other, factor in zip(gradients, wanted, (up, gate), strict=True):
        # The slope of silu, of up to 1.1, is a difference that may vanish.
        terms = (upstream * factor.detach()).abs().double()
        assert ((one - other).abs() <= 16 * EPS * terms + 1e-30).all()


def test_gate_of_what_is_not_a_number():
    for gate in (torch.nan, torch.inf):
        got = swiglu(torch.full((1, 20), gate), torch.ones(1, 20))
        assert got.isnan().all() if gate != gate else got.isinf().all()
