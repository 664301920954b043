"""Attention without padding: the kernel for sequences of any lengths computes what one call for each length does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core.training.batching.packing import Block
from areal_core.training.model import attention
from areal_core.training.model.attention import attention_by_block, bounds, causal_attention, causal_kernel

BLOCKS = (Block(3, 2), Block(1, 5), Block(2, 7))  # 25 tokens


def packed_heads(heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(25, count, 8, generator=generator, requires_grad=True) for count in (heads, kv_heads, kv_heads)]


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
        return attention_by_block(query, key, value, BLOCKS)

    return of_torch_2_13 if takes_groups else of_torch_2_11


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("takes_groups", [False, True])
def test_the_kernel_gets_all_sequences_at_once(takes_groups: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch):
    inputs = packed_heads(4, kv_heads)
    expected = attention_by_block(*inputs, BLOCKS)
    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr(attention, "_kernel", lambda: causal_kernel(varlen_attn(takes_groups)))
    got = causal_attention(*inputs, BLOCKS)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_installed_kernel_takes_these_arguments(kv_heads: int):
    from torch.nn.attention.varlen import varlen_attn

    calls = []

    def asked(*arguments: Any, **options: Any) -> Tensor:
        calls.append(inspect.signature(varlen_attn).bind(*arguments, **options).arguments)
        return arguments[0]

    asked.__signature__ = inspect.signature(varlen_attn)  # type: ignore[attr-defined]
    query, key, value = packed_heads(4, kv_heads)
    causal_kernel(asked)(query, key, value, bounds(BLOCKS, torch.device("cpu")), 7)
    [call] = calls
    assert call["window_size"] == (-1, 0)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        assert call.get("enable_gqa", False) == (kv_heads == 2)
    else:  # torch 2.11: a key and a value for every query head
        assert call["key"].shape == call["value"].shape == call["query"].shape
    assert (call["max_q"], call["max_k"]) == (7, 7)
