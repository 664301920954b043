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


def reference(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int) -> Tensor:
    """By definition, sequence by sequence and head by head; knows nothing but where sequences begin."""
    assert starts.dtype == torch.int32
    assert longest == int(starts.diff().max())
    shared = query.shape[1] // key.shape[1]
    outputs = []
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        heads = []
        for head in range(query.shape[1]):
            q, k, v = query[start:end, head], key[start:end, head // shared], value[start:end, head // shared]
            scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)


def of_torch_2_11(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
                  *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:  # fmt: skip
    assert (window_size, cu_seq_q.data_ptr(), max_q) == ((-1, 0), cu_seq_k.data_ptr(), max_k)
    assert key.shape[1] == query.shape[1]
    return reference(query, key, value, cu_seq_q, max_q)


def of_torch_2_13(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
                  *, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:  # fmt: skip
    assert (window_size, cu_seq_q.data_ptr(), max_q) == ((-1, 0), cu_seq_k.data_ptr(), max_k)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return reference(query, key, value, cu_seq_q, max_q)


KERNELS = [of_torch_2_11, of_torch_2_13]


def use(monkeypatch: pytest.MonkeyPatch, varlen_attn: Any) -> None:
    monkeypatch.setattr(attention, "has_kernel", lambda query: True)
    monkeypatch.setattr(attention, "_kernel", lambda: causal_kernel(varlen_attn))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("varlen_attn", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_kernel_computes_what_one_call_a_length_does(
    varlen_attn: Any, kv_heads: int, monkeypatch: pytest.MonkeyPatch
):
    inputs = packed_heads(4, kv_heads)
    expected = attention_by_block(*inputs, BLOCKS)
    use(monkeypatch, varlen_attn)
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
