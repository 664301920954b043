"""Causal attention within each sequence of a pack, without padding.

Half precision on a GPU has a kernel that takes sequences of any lengths at once. Everything else runs once for each
group of sequences of the same length, which are contiguous. Axes: T packed tokens, N sequences, H query heads, K
key-value heads, D width of a head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Blocks = tuple[tuple[int, int], ...]  # (sequences, tokens of each), in the order of the pack
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]  # query, key, value, bounds [N + 1], longest sequence

_KERNEL_WIDTHS = range(8, 257, 8)  # of a head


def causal_attention(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
    """query [T, H, D], key and value [T, K, D] -> [T, H, D]; H is a multiple of K."""
    if has_kernel(query):
        longest = max(length for _, length in blocks)
        return _kernel()(query, key, value, bounds(blocks, query.device), longest)
    return attention_by_length(query, key, value, blocks)


def has_kernel(query: Tensor) -> bool:
    """Whether sequences of different lengths can be attended to in one call."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in _KERNEL_WIDTHS


def attention_by_length(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
    """What `causal_attention` returns, by one call for each length."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and query.is_cuda:  # where but half precision's kernel none that saves memory takes shared heads
        key, value = _spread(key, shared), _spread(value, shared)
    sizes = [count * length for count, length in blocks]
    outputs = []
    for (count, length), *parts in zip(blocks, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


@functools.lru_cache(maxsize=16)
def bounds(blocks: Blocks, device: torch.device) -> Tensor:
    """[N + 1], int32: where each sequence begins, and where the last one ends. Made once for all layers of a pass."""
    counts, lengths = zip(*blocks, strict=True)
    ends = np.cumsum(np.repeat(lengths, counts))
    return torch.tensor([0, *ends.tolist()], dtype=torch.int32, device=device)


def causal_kernel(varlen_attn: Callable[..., Any]) -> Kernel:
    """torch's `varlen_attn` for causal self-attention, asked in the words of the installed version: torch 2.10 has
    `is_causal` and later ones a window; those that know no `enable_gqa` get a key and a value for every query head."""
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        options, shared = causal, query.shape[1] // key.shape[1]
        if shared > 1 and "enable_gqa" in known:
            options = causal | {"enable_gqa": True}
        elif shared > 1:
            key, value = _spread(key, shared), _spread(value, shared)
        return varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)

    return attend


def _spread(tensor: Tensor, shared: int) -> Tensor:
    """[T, K, D] -> [T, K * shared, D]: each key-value head for all query heads that share it."""
    return tensor.repeat_interleave(shared, dim=1)


@functools.cache
def _kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn  # brings torch's compiler along: seconds

    return causal_kernel(varlen_attn)
