"""Operations of a layer against their definitions, in float64, with the gradients that autograd finds."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_core.training.batching.packing import Block, Blocks
from areal_core.training.model import operations
from areal_core.training.model.operations import (
    attention_by_block,
    causal_attention,
    causal_kernel,
    rms_norm,
    rotate,
    swiglu,
)

RAGGED = (Block(3, 2), Block(1, 5), Block(2, 7))  # 25 tokens


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_heads(heads: int, kv_heads: int) -> list[Tensor]:
    return [drawn(25, count, 8, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads))]


def varlen_attn(takes_groups: bool) -> Any:
    """torch's kernel, of 2.13 or of 2.11, which knows no `enable_gqa`: the calls that they take."""

    def of_torch_2_11(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
                      max_k: int, *, window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
        assert key.shape[1] == query.shape[1]
        return of_torch_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)

    def of_torch_2_13(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k:
                      int, *, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:  # fmt: skip
        assert (window_size, max_q, max_k) == ((-1, 0), 7, 7)
        assert cu_seq_q.tolist() == cu_seq_k.tolist() == [0, 2, 4, 6, 11, 18, 25]
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return attention_by_block(query, key, value, RAGGED)

    return of_torch_2_13 if takes_groups else of_torch_2_11


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("takes_groups", [False, True])
def test_the_kernel_gets_all_sequences_at_once(takes_groups: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch):
    inputs = packed_heads(4, kv_heads)
    expected = attention_by_block(*inputs, RAGGED)
    monkeypatch.setattr(operations, "has_kernel", lambda query: True)
    monkeypatch.setattr(operations, "_kernel", lambda: causal_kernel(varlen_attn(takes_groups)))
    got = causal_attention(*inputs, RAGGED)
    torch.testing.assert_close(got, expected)


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
    """It turns pairs, and its gradient turns them back."""
    angles, x = drawn(33, 1, width // 2, seed=1), drawn(33, 3, width, seed=2).requires_grad_()
    pairs = torch.complex(*x.detach().double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    got = rotate(x, *(torch.cat((table, table), -1) for table in (angles.cos(), angles.sin())))
    assert_rounded(got, torch.cat((pairs.real, pairs.imag), -1), 2)
    (back,) = torch.autograd.grad(got, x, got)
    assert_rounded(back, x.detach().double(), 8)


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


TOKENS, WIDTH, NORM_EPS = 57, 24, 1e-6


def test_norm_and_its_gradients_are_those_of_the_definition():
    """For rows of very different lengths, one of them all zeros."""
    scales = torch.logspace(-3, 3, TOKENS)[:, None].clone()
    scales[7] = 0
    x = (drawn(TOKENS, WIDTH, seed=1) * scales).requires_grad_()
    weight, upstream = drawn(WIDTH, seed=2).requires_grad_(), drawn(TOKENS, WIDTH, seed=3)
    exact_x, exact_weight = (value.detach().double().requires_grad_() for value in (x, weight))
    exact = exact_x / (exact_x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * exact_weight
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), upstream.double())
    result = rms_norm(x, weight, NORM_EPS)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(result, (x, weight), upstream), expected, strict=True):
        row = wanted.abs().amax(-1, keepdim=True)  # rounding is relative to the largest entry of a row
        assert ((gradient.double() - wanted).abs() <= 1e-5 * row + 1e-12).all()
